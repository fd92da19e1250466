"""vLLM's real scheduler, evicting, in front of a worker that keeps books instead of computing.

The worker writes into every slot of its "KV cache" which text was computed there and whether all of that text was
visible meanwhile. So after every step it can be said, without asking the product: every slot a request reads holds
that request's own text, and every page offered by the prefix cache was computed with everything visible.
"""

from __future__ import annotations

import copy
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_block_hash, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_evict.config import CONFIG_KEY, EvictionConfig
from vllm_evict.engine.messages import EvictionUpdate, PageScores, ScoreReport, attach_report, update_of
from vllm_evict.engine.resident import ResidentTable
from vllm_evict.engine.scheduler import AsyncEvictionScheduler, EvictionScheduler
from vllm_evict.engine.spec import EvictingAttentionSpec
from vllm_evict.pages import pages_for, peak_pages
from vllm_evict.requests import RequestEviction, request_eviction, server_eviction

PAGE_TOKENS = 4
LAYER = {"block_size": PAGE_TOKENS, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
STOCK_SPEC = FullAttentionSpec(**LAYER)


def configured(
    stock: VllmConfig,
    settings: dict | None,
    *,
    num_blocks: int = 17,
    max_model_len: int = 64,
    chunk_tokens: int = 16,
    max_seqs: int = 8,
    caching: bool = True,
    async_scheduling: bool = False,
) -> VllmConfig:
    """A copy of `stock` with pages of 4 tokens and these sizes. `settings`: of eviction; None = off."""
    config = copy.copy(stock)
    for part in ("model_config", "cache_config", "scheduler_config"):
        setattr(config, part, copy.copy(getattr(stock, part)))
    config.model_config.max_model_len = max_model_len
    config.cache_config.block_size = PAGE_TOKENS
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.enable_prefix_caching = caching
    config.scheduler_config.max_num_batched_tokens = chunk_tokens
    config.scheduler_config.max_num_seqs = max_seqs
    config.scheduler_config.async_scheduling = async_scheduling
    config.additional_config = {} if settings is None else {CONFIG_KEY: settings}
    return config


def make_spec(config: VllmConfig) -> EvictingAttentionSpec:
    settings = EvictionConfig(**config.additional_config[CONFIG_KEY])
    return EvictingAttentionSpec.from_full_attention(STOCK_SPEC, settings, config)


def window_spec(window_tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(**LAYER, sliding_window=window_tokens)


def make_scheduler(config: VllmConfig, specs: list[KVCacheSpec] | None = None) -> Scheduler:
    """The scheduler that `config` asks for; without eviction settings vLLM's own. `specs`: one per group."""
    init_none_hash(sha256)
    evicting = CONFIG_KEY in config.additional_config
    specs = specs or [make_spec(config) if evicting else STOCK_SPEC]
    kv_cache_config = KVCacheConfig(
        num_blocks=config.cache_config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)],
    )
    ours = AsyncEvictionScheduler if config.scheduler_config.async_scheduling else EvictionScheduler
    return (ours if evicting else Scheduler)(
        config, kv_cache_config, StructuredOutputManager(config), block_size=PAGE_TOKENS
    )


def make_prompt(request_id: str, num_tokens: int) -> list[int]:
    """A text that no other request has."""
    return [zlib.crc32(f"{request_id}:{i}".encode()) % 400 for i in range(num_tokens)]


def make_request(request_id: str, prompt: list[int], max_tokens: int, xargs: dict | None = None) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=xargs),
        pooling_params=None,
        block_hasher=get_request_block_hasher(PAGE_TOKENS, sha256),
    )


def runner_output_of(output: SchedulerOutput, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
    """Rows in another order than the scheduler's: nothing may depend on it."""
    request_ids = list(reversed(output.num_scheduled_tokens))
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: row for row, request_id in enumerate(request_ids)},
        sampled_token_ids=[sampled[request_id] for request_id in request_ids],
    )


def score_of(request_id: str, page: int) -> float:
    """What the worker says of a page: anything, but the same each time and another for each request."""
    return zlib.crc32(f"{request_id}/{page}".encode()) / 2**32


@dataclass
class Step:
    """What one step did, for tests to look at."""

    output: SchedulerOutput
    update: EvictionUpdate
    runner_output: ModelRunnerOutput | AsyncModelRunnerOutput
    appended: dict[str, int] = field(default_factory=dict)
    """Pages that each request got in this step, prefix hits included."""
    held: dict[str, int] = field(default_factory=dict)
    """Resident pages of each request after `schedule()`."""


class Bench:
    """Drives scheduler and worker, and checks everything after every step.

    Args:
        stock: a config of vLLM's own.
        policy: with a budget of 4 pages, 1 of them sink, 2 recent, unless `settings` says otherwise.
        window_tokens: if given, there is a group of sliding-window layers as well (and it comes first).
        options: see `configured`.

    """

    def __init__(self, stock: VllmConfig, *, policy="streaming", window_tokens: int | None = None, **options):
        settings = {"policy": policy, "budget": 16, "sink": 4, "recent": 8} | options.pop("settings", {})
        self.config = configured(stock, settings, **options)
        self.settings = EvictionConfig(**settings)
        self.budget = self.settings.page_budget(PAGE_TOKENS)
        self.window_tokens = window_tokens
        spec = make_spec(self.config)
        self.scheduler = make_scheduler(self.config, [window_spec(window_tokens), spec] if window_tokens else [spec])
        self.manager = self.scheduler.page_evictor
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.max_pages = self.manager.kv_cache_spec.max_pages
        self.evictions: dict[str, RequestEviction] = {}
        self.managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.table = ResidentTable(self.manager.kv_cache_group_id)
        self.window_table = ResidentTable(0) if window_tokens else None
        self.steps_in_flight = 2 if self.config.scheduler_config.async_scheduling else 1
        self.pending: deque[tuple[SchedulerOutput, ModelRunnerOutput | AsyncModelRunnerOutput]] = deque()
        self.steps: list[Step] = []
        self.finished: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.peak_pages = 0
        self._stalled_steps = 0
        self._fingerprints: dict[str, list[int]] = {}
        self._fingerprint_of_hash: dict[bytes, int] = {}
        # Per block and slot: (text up to and with this token, all of it visible), or None for garbage.
        self._kv: list[list[tuple[int, bool] | None]] = [[None] * PAGE_TOKENS for _ in self.pool.blocks]
        self._null_ref_cnt = self.pool.null_block.ref_cnt
        self.check()

    # ---- what a client does ----

    def add(self, request_id: str, prompt: list[int] | int, max_tokens: int = 8, xargs: dict | None = None) -> Request:
        """`prompt`: token ids, or a number of tokens that no other request has; `xargs`: what it asks for itself."""
        prompt = make_prompt(request_id, prompt) if isinstance(prompt, int) else prompt
        self.evictions[request_id] = (
            request_eviction(self.settings, xargs, PAGE_TOKENS, len(prompt))
            if xargs
            else server_eviction(self.settings, PAGE_TOKENS)
        )
        self.prompts[request_id] = prompt
        self._fingerprints[request_id] = []
        request = make_request(request_id, prompt, max_tokens, xargs)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.check()

    def preempt(self, request_id: str) -> Request:
        """What the scheduler does when the pool is empty."""
        request = self.scheduler.requests[request_id]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)
        self.check()
        return request

    # ---- the engine's loop ----

    def step(self) -> Step:
        step = self.schedule()
        if len(self.pending) >= self.steps_in_flight:
            self.process()
        return step

    def schedule(self) -> Step:
        """Schedule a step and run it on the worker."""
        held_before = {request_id: len(self.blocks(request_id)) for request_id in self.scheduler.requests}
        processed = {
            r: live.num_computed_tokens - live.num_in_flight_tokens for r, live in self.scheduler.requests.items()
        }
        output = self.scheduler.schedule()
        update = update_of(output)
        self.table.apply(output, update)
        if self.window_table is not None:
            self.window_table.apply(output, EvictionUpdate())
        restarted = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        for request_id in update.holes.keys() - restarted:
            last = max(update.holes[request_id])
            assert (last + 1) * PAGE_TOKENS <= processed[request_id], "a step in flight still works on it (invariant 5)"
        step = Step(output, update, self._run(output, update))
        for request_id in output.num_scheduled_tokens:
            before = 0 if request_id in restarted else held_before[request_id]
            step.appended[request_id] = len(self.blocks(request_id)) - before
        step.held = {request_id: len(self.resident(request_id)) for request_id in self.scheduler.requests}
        self.steps.append(step)
        self.pending.append((output, step.runner_output))
        # Who waits while nobody runs has the whole pool to himself.
        stalled = bool(self.scheduler.waiting) and not self.scheduler.running
        self._stalled_steps = self._stalled_steps + 1 if stalled else 0
        assert self._stalled_steps < 2, "requests wait, nobody runs, and nothing is done about it"
        self.check()
        self._check_bound(step, restarted)
        return step

    def process(self) -> None:
        """Hand the oldest step's output to the scheduler."""
        before = dict(self.scheduler.requests)
        output, runner_output = self.pending.popleft()
        if isinstance(runner_output, AsyncModelRunnerOutput):
            runner_output = self.read(runner_output)
        self.scheduler.update_from_output(output, runner_output)
        for request_id, request in before.items():
            if request_id not in self.scheduler.requests:
                self.finished[request_id] = list(request.output_token_ids)
        self.check()

    def read(self, runner_output: AsyncModelRunnerOutput) -> ModelRunnerOutput:
        """What the engine does with an output that is not there yet."""
        return runner_output.get_output()

    def run(self, max_steps: int = 500) -> None:
        """Until nobody is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                self.step()  # so that the worker hears of the last ones
                while self.pending:
                    self.process()
                return
            self.step()
        raise AssertionError(f"requests {list(self.scheduler.requests)} are still there after {max_steps} steps")

    def run_until(self, condition, max_steps: int = 200) -> Step:
        for _ in range(max_steps):
            step = self.step()
            if condition():
                return step
        raise AssertionError("it never came to that")

    # ---- what tests ask ----

    def blocks(self, request_id: str):
        """The request's block list, holes included."""
        return self.manager.req_to_blocks.get(request_id, [])

    def resident(self, request_id: str) -> list[int]:
        """Logical pages that hold a block, counted from the list itself."""
        return [page for page, block in enumerate(self.blocks(request_id)) if block is not self.pool.null_block]

    def holes(self, request_id: str) -> list[int]:
        resident = set(self.resident(request_id))
        return [page for page in range(len(self.blocks(request_id))) if page not in resident]

    def drawn(self, request_id: str) -> str:
        """`o.oo`: page 1 is a hole."""
        return "".join("." if block is self.pool.null_block else "o" for block in self.blocks(request_id))

    def token_at(self, request_id: str, position: int) -> int:
        prompt = self.prompts[request_id]
        return prompt[position] if position < len(prompt) else zlib.crc32(f"{request_id}>{position}".encode()) % 400

    # ---- the worker ----

    def _fingerprint(self, request_id: str, position: int) -> int:
        """Stands for the text of tokens 0..position."""
        known = self._fingerprints[request_id]
        while len(known) <= position:
            known.append(hash((known[-1] if known else 0, self.token_at(request_id, len(known)))))
        return known[position]

    def _run(self, output: SchedulerOutput, update: EvictionUpdate) -> ModelRunnerOutput:
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self._forward(request_id, num_tokens)
        sampled = {}
        for request_id in output.num_scheduled_tokens:
            request = self.table[request_id]
            position = request.num_computed_tokens + request.num_scheduled_tokens
            prefilling = self.scheduler.requests[request_id].is_prefill_chunk
            sampled[request_id] = [] if prefilling else [self.token_at(request_id, position)]
        runner_output = runner_output_of(output, sampled)
        if update.wanted:
            attach_report(runner_output, ScoreReport({r: self.scores(r, epoch) for r, epoch in update.wanted.items()}))
        return runner_output

    def scores(self, request_id: str, epoch: int) -> PageScores:
        pages = self.table[request_id].pages
        scores = np.array([score_of(request_id, int(page)) for page in pages])
        return PageScores(epoch, pages.copy(), dict.fromkeys(self.settings.make_policy().signals, scores))

    def _forward(self, request_id: str, num_tokens: int) -> None:
        """Write this step's tokens, then look at everything the request reads."""
        request = self.table[request_id]
        assert request.num_scheduled_tokens == num_tokens
        first = request.num_computed_tokens
        # Per group: the block of each page, and the first token that is read.
        groups = [(dict(zip(request.pages.tolist(), request.block_ids.tolist(), strict=True)), 0)]
        if self.window_table is not None:
            row = self.window_table[request_id]
            oldest_read = max(first - self.window_tokens + 1, 0)
            groups.append((dict(zip(row.pages.tolist(), row.block_ids.tolist(), strict=True)), oldest_read))
        exact = all(
            page in block_of and self._kv[block_of[page]][slot][1]
            for block_of, oldest_read in groups
            for page, slot in (divmod(position, PAGE_TOKENS) for position in range(oldest_read, first))
        )
        for position in range(first, first + num_tokens):
            page, slot = divmod(position, PAGE_TOKENS)
            for block_of, _ in groups:
                self._kv[block_of[page]][slot] = (self._fingerprint(request_id, position), exact)
        for block_of, oldest_read in groups:
            for page, block_id in block_of.items():
                for slot in range(min(PAGE_TOKENS, first + num_tokens - page * PAGE_TOKENS)):
                    entry = self._kv[block_id][slot]
                    position = page * PAGE_TOKENS + slot
                    assert position < oldest_read or (entry and entry[0] == self._fingerprint(request_id, position)), (
                        f"{request_id!r} reads foreign or overwritten text at token {position}, block {block_id}"
                    )

    # ---- checks ----

    def check(self) -> None:
        self._check_pool()
        self._check_state()
        self._check_prefix_cache()
        for block in self.pool.free_block_queue.get_all_free_blocks():
            if block.block_hash is None:
                self._kv[block.block_id] = [None] * PAGE_TOKENS  # garbage from now on

    def _check_pool(self) -> None:
        """O-POOL."""
        null, free = self.pool.null_block, self.pool.free_block_queue.get_all_free_blocks()
        free_ids = [block.block_id for block in free]
        tables = [
            [block.block_id for block in blocks if block is not null]
            for manager in self.managers
            for blocks in manager.req_to_blocks.values()
        ]
        named = Counter(block_id for ids in tables for block_id in ids)
        assert len(free_ids) == len(set(free_ids)) == self.pool.get_num_free_blocks()
        assert len(free_ids) + len(named) + 1 == len(self.pool.blocks), "free + held + 1 null = total"
        assert not set(free_ids) & set(named) and null.block_id not in free_ids
        for ids in tables:
            assert len(ids) == len(set(ids)), "a request names a block twice"
        for block in self.pool.blocks:
            if block is not null:
                assert block.ref_cnt == named[block.block_id], f"block {block.block_id}"
                assert not block.is_null
        assert null.is_null and null.block_hash is None
        if self.window_table is None:  # vLLM's own window groups count it
            assert null.ref_cnt == self._null_ref_cnt

    def _check_state(self) -> None:
        running = {request.request_id for request in self.scheduler.running}
        holders = {request_id for request_id, blocks in self.manager.req_to_blocks.items() if blocks}
        assert holders <= running, "who does not run holds nothing"
        assert set(self.manager._pages) == holders, "state lives exactly as long as the blocks"
        assert self.manager._over_budget | self.manager._over_floor | set(self.manager._new_holes) <= holders
        stats = self.manager.stats
        assert stats.num_resident_pages == sum(len(self.resident(request_id)) for request_id in holders)
        assert stats.num_logical_pages == sum(len(self.blocks(request_id)) for request_id in holders)
        for request_id in holders:
            resident = self.resident(request_id)
            assert self.manager._pages[request_id].resident == resident
            assert self.manager._pages[request_id].num_pages == len(self.blocks(request_id))
            assert self.manager.resident_pages(request_id) == len(resident)
            eviction = self.evictions[request_id]
            budget, floor = eviction.budget, eviction.floor
            assert (request_id in self.manager._over_budget) == (budget.excess_pages(len(resident)) > 0)
            over_floor = floor is not None and floor.excess_pages(len(resident)) > 0
            assert (request_id in self.manager._over_floor) == over_floor
            if budget.budget_pages is not None:
                most_pages = peak_pages(budget.budget_pages, self.config.max_in_flight_tokens, PAGE_TOKENS)
                assert len(resident) <= most_pages, f"{request_id!r} holds {self.drawn(request_id)}"
            kept = {*range((floor or budget).sink_pages), *budget.pinned_pages}
            assert kept & set(range(len(self.blocks(request_id)))) <= set(resident)
            self.peak_pages = max(self.peak_pages, len(resident))

    def _check_prefix_cache(self) -> None:
        """Every page on offer was computed with its whole text visible, and holds the text it is offered for."""
        for request_id, request in self.scheduler.requests.items():
            for page, block_hash in enumerate(request.block_hashes):
                self._fingerprint_of_hash[block_hash] = self._fingerprint(request_id, (page + 1) * PAGE_TOKENS - 1)
        for block in self.pool.blocks:
            if block.block_hash is not None:
                text = self._fingerprint_of_hash[get_block_hash(block.block_hash)]
                entries = self._kv[block.block_id]
                assert entries[-1] == (text, True), f"block {block.block_id} is offered as what it is not"
                assert all(entry is not None and entry[1] for entry in entries)

    def _check_bound(self, step: Step, restarted: set[str]) -> None:
        """After `schedule()` the worker's table is the manager's; nobody is over budget but by this step's pages."""
        for request_id in self.manager._pages:
            request = self.table[request_id]
            resident = self.resident(request_id)
            assert request.pages.tolist() == resident and request.num_pages == len(self.blocks(request_id))
            assert request.block_ids.tolist() == [self.blocks(request_id)[page].block_id for page in resident]
            scheduled = step.output.num_scheduled_tokens.get(request_id, 0)
            assert request.num_scheduled_tokens == scheduled
            live = self.scheduler.requests[request_id]
            assert request.num_computed_tokens + scheduled == live.num_computed_tokens
            assert request.num_pages == pages_for(live.num_computed_tokens, PAGE_TOKENS)
            budget_pages = self.evictions[request_id].budget.budget_pages
            if self.steps_in_flight == 1 and budget_pages is not None:
                appended = step.appended.get(request_id, 0)
                if request_id in restarted:
                    appended = request.num_pages - request.num_computed_tokens // PAGE_TOKENS
                assert len(resident) - appended <= budget_pages
                if scheduled == 1:
                    assert len(resident) <= budget_pages + 1
        assert len(self.table) == len(self.manager._pages)
