"""A real vLLM engine in this process, and a record of everything it did.

`Engine` starts vLLM on a tiny model and runs prompts given as tokens. After every step it writes down, from vLLM's own
objects and from what the model and the attention kernels were handed, who sat where: a `Run` is that record together
with the answers and the eviction trace. Nothing is judged here; `checks.py` does that, so that a fault shows in the
check it belongs to.

Several engines may follow each other in one process (half a second each), but not live at the same time.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from unittest import mock

import torch

from tests.oracle.forward import load, masked_forward
from tests.oracle.mass import page_mass
from tests.oracle.rebased import Rebase, rebased_forward
from tests.oracle.trace import TraceLine, evictions_of, read_rebases, read_trace
from tests.oracle.visibility import visibility_mask

PAGE_TOKENS = 32
"""The smallest page the CPU kernel takes."""

VOCAB_TOKENS = 512

Table = tuple[int | None, ...]
"""Block id per logical page; None for a hole."""


@dataclass(frozen=True)
class Row:
    """One request in one step.

    Args:
        epoch: preemptions so far.
        num_computed_tokens: tokens computed before the step.
        num_scheduled_tokens: tokens of the step.
        num_tokens: prompt and output tokens known when the step began.
        num_cached_tokens: at a (re)start, tokens that came from the prefix cache; else 0.
        table: the scheduler's blocks after scheduling.
        positions: what the model was told, per token.
        slots: where the attention layers write, per token: block id * page + offset.
        attended: the blocks that the attention kernel reads, in its order.
        physical_tokens: how many tokens it reads from them.
    """

    epoch: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    num_tokens: int
    num_cached_tokens: int
    table: Table
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    attended: tuple[int, ...]
    physical_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the step ends with a new output token."""
        return self.num_computed_tokens + self.num_scheduled_tokens == self.num_tokens


@dataclass(frozen=True)
class Pool:
    """vLLM's block pool at one moment.

    Args:
        num_blocks: all, the null block included.
        null: id of the null block.
        free: ids in the free queue, in its order.
        ref_counts: of every block but the null block.
        hashed: ids of blocks that a prefix look-up can find.
        tables: of every live request that holds blocks, scheduled or not.
    """

    num_blocks: int
    null: int
    free: tuple[int, ...]
    ref_counts: Mapping[int, int]
    hashed: frozenset[int]
    tables: Mapping[str, Table]


@dataclass(frozen=True)
class Step:
    """One engine step. `scheduled` is the pool between scheduling and execution, `settled` the pool after the step."""

    rows: Mapping[str, Row]
    preempted: tuple[str, ...]
    allocated: tuple[int, ...]
    scheduled: Pool
    settled: Pool


@dataclass(frozen=True)
class Answer:
    """What the API returned.

    Args:
        prompt: tokens.
        tokens: output tokens.
        logit_tokens: int64 `[output tokens, k]`, the tokens whose raw logits were returned.
        logits: float32 `[output tokens, k]`.
        finish_reason: vLLM's.
        text: the detokenized answer, if that was asked for.
        prompt_logits: float32 `[prompt tokens - 1, vocab]`, if they were asked for: what follows each prompt token.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logit_tokens: torch.Tensor
    logits: torch.Tensor
    finish_reason: str | None
    text: str = ""
    prompt_logits: torch.Tensor | None = None


@dataclass
class Reference:
    """The oracle's view of one epoch of one request.

    Args:
        logits: float32 `[tokens, vocab]`.
        page_mass: float64 `[tokens, pages]`, of every query; None if the policy keeps no scores.
    """

    logits: torch.Tensor
    page_mass: torch.Tensor | None


@dataclass
class Run:
    """Everything that happened between the first request and the last answer."""

    model: Path
    eviction: Mapping[str, object]
    chunk_tokens: int
    page_tokens: int = PAGE_TOKENS
    steps_in_flight: int = 1
    steps: list[Step] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    trace: dict[str, list[TraceLine]] = field(default_factory=dict)
    rebases: dict[tuple[str, int], list[Rebase]] = field(default_factory=dict)
    kernel_calls: dict[str, int] = field(default_factory=dict)  # by name, where somebody counts them
    captured_calls: dict[str, int] = field(default_factory=dict)  # of those, what CUDA graphs hold
    _references: dict[tuple[str, int], Reference] = field(default_factory=dict)

    def rows(self, name: str) -> list[Row]:
        """The steps in which a request took part."""
        return [step.rows[name] for step in self.steps if name in step.rows]

    def rows_of_epoch(self, name: str, epoch: int) -> list[Row]:
        """The same, of one life of the request."""
        return [row for row in self.rows(name) if row.epoch == epoch]

    def lines(self, name: str, epoch: int | None = None) -> list[TraceLine]:
        """The request's trace, of one epoch or all."""
        return [line for line in self.trace.get(name, ()) if epoch is None or line.epoch == epoch]

    def epochs(self, name: str) -> list[int]:
        """Epochs in which the request ran."""
        return sorted({row.epoch for row in self.rows(name)})

    @cached_property
    def oracle(self):
        """The model as the oracle reads it."""
        return load(self.model)

    def reference(self, name: str, epoch: int) -> Reference:
        """The eager forward over prompt and output, under the mask of that epoch's evictions."""
        key = (name, epoch)
        if key not in self._references:
            answer, scored = self.answers[name], self.eviction.get("policy") in ("h2o", "h2o-keydiff")
            tokens = answer.prompt + answer.tokens
            mask = visibility_mask(len(tokens), self.page_tokens, evictions_of(self.lines(name), epoch))
            rebases = self.rebases.get(key, [])
            if rebases:
                logits, attentions, _ = rebased_forward(self.oracle, tokens, mask, self.page_tokens, rebases)
            else:
                logits, attentions = masked_forward(self.oracle, tokens, mask, attentions=scored)
            mass = page_mass(attentions, self.page_tokens) if scored else None
            self._references[key] = Reference(logits, mass)
        return self._references[key]


class Engine:
    """vLLM, in this process, on a tiny model.

    Args:
        model: a Hugging Face folder.
        eviction: settings for `additional_config["kv_eviction"]`; None leaves the key out.
        trace: file for the eviction trace (needed to judge anything about evictions).
        chunk_tokens: most tokens of a step, so of a prefill chunk.
        num_pages: pool size, null block included; None: whatever 8 MiB hold.
        quiet: let vLLM's log of the start pass unseen.
        **llm_args: for `vllm.LLM`.
    """

    def __init__(
        self,
        model: Path,
        *,
        eviction: Mapping[str, object] | None = None,
        trace: Path | None = None,
        chunk_tokens: int = 2 * PAGE_TOKENS,
        num_pages: int | None = 128,
        prefix_caching: bool = True,
        max_model_len: int = 2048,
        max_num_seqs: int = 16,
        page_tokens: int = PAGE_TOKENS,
        quiet: bool = True,
        **llm_args: object,
    ) -> None:
        from vllm import LLM

        _settle_process()
        self.model = Path(model)
        self.eviction = dict(eviction or {})
        self.page_tokens = page_tokens
        self._trace = trace
        if trace is not None:
            self.eviction["trace"] = str(trace)
            Path(trace).unlink(missing_ok=True)
        if eviction is not None:
            llm_args["additional_config"] = {"kv_eviction": self.eviction}
        arguments = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "distributed_executor_backend": "uni",
            "block_size": page_tokens,
            "kv_cache_memory_bytes": 8 << 20 if num_pages is None else 64 << 20,
            "num_gpu_blocks_override": num_pages,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": chunk_tokens,
            "max_num_seqs": max_num_seqs,
            "enable_prefix_caching": prefix_caching,
            "seed": 0,
            "logprobs_mode": "raw_logits",
            "max_logprobs": -1,
            "use_tqdm_on_load": False,
        }
        try:
            with _without_gc(), _without_log(quiet):
                self.llm = LLM(str(model), **arguments | llm_args)
        except BaseException:
            _clean_up_after_failed_start()
            raise
        self._names: dict[str, str] = {}  # vLLM's request id -> ours
        self._step: dict = {}
        self._run: Run | None = None
        self._watch()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        self._hook.remove()
        with _without_gc():
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    # ---- vLLM's objects ----

    @property
    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self):
        return self.core.scheduler

    @property
    def worker(self):
        return self.core.model_executor.driver_worker.worker

    @property
    def runner(self):
        return self.worker.model_runner

    @property
    def manager(self):
        """The block manager of the full-attention group: the evictor, or vLLM's own."""
        evictor = getattr(self.scheduler, "page_evictor", None)
        return evictor or self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]

    @property
    def pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def kv_caches(self) -> list[torch.Tensor]:
        """Per layer of the group `[blocks, ...]`."""
        context = self.core.vllm_config.compilation_config.static_forward_context
        return [context[name].kv_cache for name in self._layer_names]

    @property
    def _layer_names(self) -> list[str]:
        groups = self.runner.kv_cache_config.kv_cache_groups
        return groups[self.manager.kv_cache_group_id].layer_names

    @property
    def chunk_tokens(self) -> int:
        return self.scheduler.max_num_scheduled_tokens

    @chunk_tokens.setter
    def chunk_tokens(self, tokens: int) -> None:
        """Lower the tokens of a step; one engine then serves several chunk sizes."""
        assert tokens <= self.scheduler.scheduler_config.max_num_batched_tokens
        self.scheduler.max_num_scheduled_tokens = tokens

    # ---- running ----

    def run(
        self,
        prompts: Mapping[str, Sequence[int]],
        *,
        max_tokens: int | Mapping[str, int],
        arrive_at: Mapping[str, int] | None = None,
        before_step: Callable[[int], None] | None = None,
        num_logits: int = 16,
        prompt_logits: bool = False,
        max_steps: int = 20_000,
    ) -> Run:
        """Greedy answers to `prompts`, all known by their names.

        Args:
            prompts: tokens by name; names must be new to this engine.
            max_tokens: output tokens, of all or by name; always that many.
            arrive_at: step before which a request is handed in (default 0).
            before_step: called with the number of the step that comes next.
            num_logits: raw logits to fetch per output token, the largest ones; -1 is all.
            prompt_logits: fetch all raw logits of the prompt too.
            max_steps: a stuck engine fails instead of hanging.
        """
        run = self.begin()
        waiting = sorted((step, name) for name, step in (dict.fromkeys(prompts, 0) | dict(arrive_at or {})).items())
        for number in range(max_steps):
            while waiting and waiting[0][0] <= number:
                _, name = waiting.pop(0)
                tokens = max_tokens if isinstance(max_tokens, int) else max_tokens[name]
                self.add(name, prompts[name], max_tokens=tokens, num_logits=num_logits, prompt_logits=prompt_logits)
            if not waiting and not self.busy:
                return self.end()
            if before_step is not None:
                before_step(number)
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps: {sorted(set(prompts) - set(run.answers))}")

    def begin(self) -> Run:
        """Start a record."""
        steps_in_flight = self.core.vllm_config.max_concurrent_batches
        self._run = Run(self.model, self.eviction, self.chunk_tokens, self.page_tokens, steps_in_flight)
        return self._run

    def end(self) -> Run:
        """Finish the record with the trace."""
        run, self._run = self._run, None
        assert run is not None
        if self._trace is not None and self._trace.exists():
            for request_id, lines in read_trace(self._trace).items():
                run.trace[self._names[request_id]] = lines
            for (request_id, epoch), rebases in read_rebases(self._trace).items():
                run.rebases[self._names[request_id], epoch] = rebases
        return run

    def drain(self, max_steps: int = 5_000) -> Run:
        """Step until everybody is answered, then finish the record."""
        for _ in range(max_steps):
            if not self.busy:
                return self.end()
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps: {sorted(self.scheduler.requests)}")

    @property
    def busy(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        num_logits: int = 16,
        prompt_logits: bool = False,
        sampling: Mapping[str, object] | None = None,
        **request: object,
    ) -> None:
        """Hand in one request.

        Args:
            name: with `n > 1` in `sampling` the branches are `name/0`, `name/1`, ...
            prompt: tokens.
            max_tokens: output tokens.
            num_logits: as in `run`.
            prompt_logits: as in `run`.
            sampling: `SamplingParams` other than the greedy ones.
            **request: for vLLM's `add_request`: `priority`, `lora_request`.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        assert name not in self._names.values(), f"request {name!r} was used before"
        arguments = {
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "logprobs": num_logits,
            "prompt_logprobs": -1 if prompt_logits else None,
            "flat_logprobs": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        params = SamplingParams(**arguments | dict(sampling or {}))
        request_id = self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params, **request)
        self._names[request_id] = name
        if params.n > 1:
            self._names |= {f"{branch}_{request_id}": f"{name}/{branch}" for branch in range(params.n)}

    def abort(self, name: str) -> None:
        """Take one request back."""
        self.llm.llm_engine.abort_request([name])

    def request_id(self, name: str) -> str:
        """vLLM's id of a request."""
        return next(request_id for request_id, known in self._names.items() if known == name)

    def step(self) -> Step | None:
        """One engine step; None if it executed nothing."""
        assert self._run is not None, "begin() first"
        self._step = {"allocated": []}
        outputs = self.llm.llm_engine.step()
        for output in outputs:
            if output.finished:
                for branch in output.outputs:
                    name = output.request_id if len(output.outputs) == 1 else f"{output.request_id}/{branch.index}"
                    self._run.answers[name] = _answer(output, branch)
        if "scheduled" not in self._step:
            return None
        step = Step(
            rows=self._step.get("rows", {}),
            preempted=self._step["preempted"],
            allocated=tuple(self._step["allocated"]),
            scheduled=self._step["scheduled"],
            settled=self.snapshot(),
        )
        self._run.steps.append(step)
        return step

    def snapshot(self) -> Pool:
        """The pool now."""
        pool = self.pool
        return Pool(
            num_blocks=pool.num_gpu_blocks,
            null=pool.null_block.block_id,
            free=tuple(block.block_id for block in pool.free_block_queue.get_all_free_blocks()),
            ref_counts={block.block_id: block.ref_cnt for block in pool.blocks if not block.is_null},
            hashed=frozenset(block.block_id for block in pool.blocks if block.block_hash is not None),
            tables={
                self._names[request_id]: _table(blocks)
                for request_id, blocks in self.manager.req_to_blocks.items()
                if blocks
            },
        )

    # ---- watching ----

    def _watch(self) -> None:
        scheduler, pool = self.scheduler, self.pool
        schedule, get_new_blocks = scheduler.schedule, pool.get_new_blocks

        def watched_schedule(*args, **kwargs):
            output = schedule(*args, **kwargs)
            self._step["output"] = output
            self._step["preempted"] = tuple(sorted(self._names[i] for i in output.preempted_req_ids or ()))
            self._step["scheduled"] = self.snapshot()
            return output

        def watched_get_new_blocks(num_blocks):
            blocks = get_new_blocks(num_blocks)
            self._step.setdefault("allocated", []).extend(block.block_id for block in blocks)
            return blocks

        scheduler.schedule = watched_schedule
        pool.get_new_blocks = watched_get_new_blocks
        if hasattr(self.runner, "prepare_inputs"):  # the V2 model runner
            prepare_inputs = self.runner.prepare_inputs

            def watched_prepare_inputs(*args, **kwargs):
                batch = prepare_inputs(*args, **kwargs)
                self._step["request_ids"] = batch.req_ids
                return batch

            self.runner.prepare_inputs = watched_prepare_inputs
        self._hook = self.runner.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    read_metadata = staticmethod(lambda metadata: metadata)
    """How to find `query_start_loc`, `seq_lens`, `slot_mapping` and `block_table` in a layer's metadata."""

    def _before_forward(self, module, args, kwargs) -> None:
        from vllm.forward_context import get_forward_context

        self.watch_forward(get_forward_context().attn_metadata, kwargs["positions"])

    def watch_forward(self, attn_metadata: Mapping[str, object] | None, positions: torch.Tensor) -> int:
        """See what the model and the kernels are given, right before they run; of how many requests."""
        output = self._step.get("output")
        if output is None:
            return 0
        metadata = self.read_metadata(attn_metadata[self._layer_names[0]])
        starts = metadata.query_start_loc.tolist()
        cached_starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                cached_starts[request_id] = num_computed
        rows = {}
        request_ids = self._step.get("request_ids") or self.runner.input_batch.req_ids
        for index, request_id in enumerate(request_ids):
            request = self.scheduler.requests[request_id]
            num_scheduled = output.num_scheduled_tokens[request_id]
            start, stop = starts[index], starts[index + 1]
            physical_tokens = int(metadata.seq_lens[index])
            num_pages = -(-physical_tokens // self.page_tokens)
            rows[self._names[request_id]] = Row(
                epoch=request.num_preemptions,
                num_computed_tokens=request.num_computed_tokens - num_scheduled,
                num_scheduled_tokens=num_scheduled,
                # With asynchronous scheduling tokens that are being sampled count, but for this step's own.
                num_tokens=request.num_tokens + max(request.num_output_placeholders - 1, 0),
                num_cached_tokens=cached_starts.get(request_id, 0),
                table=_table(self.manager.req_to_blocks[request_id]),
                positions=tuple(positions[start:stop].tolist()),
                slots=tuple(metadata.slot_mapping[start:stop].tolist()),
                attended=tuple(metadata.block_table[index, :num_pages].tolist()),
                physical_tokens=physical_tokens,
            )
        self._step["rows"] = rows
        return len(rows)


def _table(blocks: Iterable) -> Table:
    return tuple(None if block.is_null else block.block_id for block in blocks)


def _answer(output, completion) -> Answer:
    flat = completion.logprobs
    widths = [end - start for start, end in zip(flat.start_indices, flat.end_indices, strict=True)]
    assert len(set(widths)) == 1 and len(widths) == len(completion.token_ids)
    return Answer(
        prompt=tuple(output.prompt_token_ids),
        tokens=tuple(completion.token_ids),
        logit_tokens=torch.tensor(flat.token_ids).view(len(widths), -1),
        logits=torch.tensor(flat.logprobs, dtype=torch.float32).view(len(widths), -1),
        finish_reason=completion.finish_reason,
        text=completion.text,
        prompt_logits=_prompt_logits(output.prompt_logprobs),
    )


def _prompt_logits(flat) -> torch.Tensor | None:
    if flat is None:
        return None
    # The first prompt token has none: an empty stretch.
    rows = torch.empty(len(flat.start_indices) - 1, VOCAB_TOKENS)
    for row, start, end in zip(rows, flat.start_indices[1:], flat.end_indices[1:], strict=True):
        row[torch.tensor(flat.token_ids[start:end])] = torch.tensor(flat.logprobs[start:end])
    return rows


_settled = False


def _settle_process() -> None:
    """What several engines in one process need, before each start."""
    global _settled
    from transformers.utils.logging import disable_progress_bar
    from vllm.platforms import current_platform

    if _settled:
        return
    _settled = True
    # vLLM puts CPU code in place of Triton kernels at every start of a worker; the second time in a process fails, and
    # so does the first if llvmlite is loaded (its search through all modules trips over llvmlite's library wrapper).
    # So it is done here, once, with llvmlite out of sight.
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "llvmlite"}
    current_platform.register_triton_kernel_overrides()
    sys.modules.update(hidden)
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    disable_progress_bar()
    gc.collect()
    gc.freeze()  # a million objects of imported modules: later collections need not look at them


@contextmanager
def _without_gc() -> Iterator[None]:
    """vLLM collects garbage eight times per start and stop, 0.6 s each; we do it once, after stopping."""
    with mock.patch("gc.collect"), mock.patch("gc.freeze"), mock.patch("gc.unfreeze"):
        yield


@contextmanager
def _without_log(quiet: bool) -> Iterator[None]:
    """A start logs a hundred lines, which would bury the report of a failing test."""
    if quiet:
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _clean_up_after_failed_start() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    with _without_gc():
        cleanup_dist_env_and_memory()


def random_prompt(num_tokens: int, seed: int, below: int = VOCAB_TOKENS) -> list[int]:
    """Tokens from a seeded generator."""
    return torch.randint(0, below, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
