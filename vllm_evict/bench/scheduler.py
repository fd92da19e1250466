"""What eviction adds to vLLM's scheduler: no model, no workers, only the two calls the engine makes each step.

256 requests decode through vLLM's real `Scheduler`, with and without eviction, in turn. Timed are `schedule()` and
`update_from_output()`, of 32 steps at a time, in which each request fills one page and so, over its budget, loses one.
Processor time counts, so that a busy machine disturbs little.
h2o is given made-up scores whenever it asks. What the engine pays for sending scores between processes is not in here.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from typing import Any

import numpy as np

from vllm_evict.bench.load import PAGE_TOKENS, POLICIES, paired_ratio, spread
from vllm_evict.bench.model_facts import embedded_model

STEPS_PER_TURN = PAGE_TOKENS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder of the model, for its config (default: the embedded one)")
    parser.add_argument("--requests", type=int, default=256, help="running requests")
    parser.add_argument("--budget", type=int, default=2048, help="tokens")
    parser.add_argument("--rounds", type=int, default=30, help=f"turns of {STEPS_PER_TURN} steps each")


def run(args: argparse.Namespace) -> int:
    model = args.model or str(embedded_model())
    # Requests are at different places in a page, so every step some of them open one.
    contexts = {
        "below": [args.budget // 4 + i % PAGE_TOKENS for i in range(args.requests)],
        "above": [args.budget + PAGE_TOKENS + i % PAGE_TOKENS for i in range(args.requests)],
    }
    ratios: dict[str, dict[str, float]] = {}
    for state, context_tokens in contexts.items():
        num_new_tokens = (args.rounds + 1) * STEPS_PER_TURN
        if state == "below":
            assert max(context_tokens) + num_new_tokens <= args.budget, "fewer rounds: it must stay below the budget"
        runs = {policy: SchedulerRun(model, policy, args.budget, context_tokens, num_new_tokens) for policy in POLICIES}
        milliseconds = measure(runs, args.rounds)
        print(f"{state} the budget of {args.budget}, {args.requests} requests running: ms per step, median [min, max]")
        for policy, values in milliseconds.items():
            evicted = runs[policy].num_evicted_pages / (args.rounds * STEPS_PER_TURN)
            print(f"  {policy:10} {spread(values, 2)}   pages evicted per step {evicted:.1f}")
        ratios[state] = {policy: paired_ratio(milliseconds[policy], milliseconds["off"]) for policy in POLICIES}
        print("  " + " ".join(f"{policy}/off={ratios[state][policy]:.3f}" for policy in POLICIES[1:]))
    worst = {policy: max(ratio[policy] for ratio in ratios.values()) for policy in POLICIES}
    print("ratios: " + " ".join(f"{policy}/off={worst[policy]:.3f}" for policy in POLICIES[1:]))
    return 0


def measure(runs: dict[str, SchedulerRun], rounds: int) -> dict[str, list[float]]:
    """Milliseconds per step of each policy, one value per round; every round goes through all policies."""
    milliseconds = defaultdict(list)
    for scheduler_run in runs.values():
        scheduler_run.turn()
        scheduler_run.num_evicted_pages = 0
    gc.collect()
    gc.freeze()  # as vLLM's engine does after start-up
    for _ in range(rounds):
        for policy, scheduler_run in runs.items():
            milliseconds[policy].append(1000 * scheduler_run.turn() / STEPS_PER_TURN)
    gc.unfreeze()
    return dict(milliseconds)


class SchedulerRun:
    """A scheduler whose requests are all decoding.

    Args:
        model: folder of the model.
        policy: `off`, or of eviction.
        budget_tokens: of the policy.
        context_tokens: prompt length of each request.
        num_new_tokens: how many tokens each may produce; more than will be asked for.

    """

    def __init__(
        self, model: str, policy: str, budget_tokens: int, context_tokens: list[int], num_new_tokens: int
    ) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        from vllm_evict.engine.resident import ResidentTable

        eviction = None if policy == "off" else {"policy": policy, "budget": budget_tokens}
        config = _engine_config(model, eviction, len(context_tokens), max(context_tokens) + num_new_tokens + 8)
        init_none_hash(sha256)
        self.scheduler = _make_scheduler(config, sum(context_tokens) + len(context_tokens) * (num_new_tokens + 64))
        self.num_evicted_pages = 0
        # What a worker would know; only its pages are needed, to score them.
        self._table = ResidentTable(0) if eviction else None
        for number, num_tokens in enumerate(context_tokens):
            request = Request(
                request_id=f"request-{number}",
                prompt_token_ids=[(number * 7919 + i) % 30000 for i in range(num_tokens)],
                sampling_params=SamplingParams(max_tokens=num_new_tokens + 2, ignore_eos=True),
                pooling_params=None,
                block_hasher=get_request_block_hasher(PAGE_TOKENS, sha256),
            )
            self.scheduler.add_request(request)
        while len(self.scheduler.running) < len(context_tokens) or self._is_prefilling():
            self._step()

    def turn(self) -> float:
        """Processor seconds of the scheduler in `STEPS_PER_TURN` steps."""
        return sum(self._step() for _ in range(STEPS_PER_TURN))

    def _is_prefilling(self) -> bool:
        return any(request.num_output_tokens == 0 for request in self.scheduler.running)

    def _step(self) -> float:
        start = time.thread_time()
        output = self.scheduler.schedule()
        seconds = time.thread_time() - start
        runner_output = self._work(output)
        start = time.thread_time()
        self.scheduler.update_from_output(output, runner_output)
        return seconds + time.thread_time() - start

    def _work(self, output: Any) -> Any:
        """The `ModelRunnerOutput` with which a worker would answer a `SchedulerOutput`."""
        from vllm.v1.outputs import ModelRunnerOutput

        from vllm_evict.engine.messages import PageScores, ScoreReport, attach_report, update_of

        requests = self.scheduler.requests
        request_ids = list(output.num_scheduled_tokens)
        sampled = [[] if requests[r].is_prefill_chunk else [row % 1000] for row, r in enumerate(request_ids)]
        runner_output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )
        update = update_of(output)
        if update is not None:
            self._table.apply(output, update)
            self.num_evicted_pages += sum(map(len, update.holes.values()))
            if update.wanted:
                attach_report(
                    runner_output,
                    ScoreReport(
                        {
                            request_id: PageScores(epoch, pages, {"attention": np.cos(pages)})
                            for request_id, epoch in update.wanted.items()
                            for pages in [self._table[request_id].pages]
                        }
                    ),
                )
        return runner_output


def _engine_config(model: str, eviction: dict[str, Any] | None, max_seqs: int, max_model_len: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model,
        max_model_len=max_model_len,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=8192,
        block_size=PAGE_TOKENS,
        skip_tokenizer_init=True,
        additional_config={} if eviction is None else {"kv_eviction": eviction},
    ).create_engine_config()


def _make_scheduler(config: Any, pool_tokens: int) -> Any:
    """The scheduler that `config` names, on a pool that is never short."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_evict.engine.configure import config_of
    from vllm_evict.engine.spec import EvictingAttentionSpec

    spec = FullAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    if config_of(config).enabled:
        spec = EvictingAttentionSpec.from_full_attention(spec, config_of(config), config)
    num_blocks = pool_tokens // PAGE_TOKENS + 1
    config.cache_config.num_gpu_blocks = num_blocks
    kv_cache_config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    scheduler_class = config.scheduler_config.get_scheduler_cls()
    return scheduler_class(config, kv_cache_config, StructuredOutputManager(config), block_size=PAGE_TOKENS)
