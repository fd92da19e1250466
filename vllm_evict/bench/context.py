"""Time per output token as the context grows: without eviction every token reads all before it.

Engines in processes of their own decode the same batch in turn (see `engine_process`). Prompts lie in the prefix cache
from the warm-up on, so that a round is decoding and little else. They are computed in one chunk and share nothing with
those of another context: what is computed after a hole, or after a hit that was cut to the budget, is not cached.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from vllm_evict.bench.engine_process import EngineProcess
from vllm_evict.bench.load import PAGE_TOKENS, POLICIES
from vllm_evict.bench.model_facts import kv_bytes_per_token

BATCH = 4
NEW_TOKENS = 25
"""Decoded per round; 24 steps of them are timed, so h2o looks at three."""


@dataclass(frozen=True)
class ContextPlan:
    """Which contexts, ascending, in tokens; budget in tokens."""

    contexts: tuple[int, ...]
    rounds: int
    budget_tokens: int = 512


QUICK = ContextPlan((256, 1024, 2048), rounds=3)
FULL = ContextPlan((256, 512, 1024, 2048, 4096, 8000), rounds=5)


@dataclass(frozen=True)
class ContextResult:
    """Milliseconds per token of a batch of `batch` requests: `{policy: one list per context, one value per round}`."""

    facts: dict[str, str]
    batch: int
    budget_tokens: int
    contexts: tuple[int, ...]
    ms_per_token: dict[str, list[list[float]]]


def measure(model: str, dtype: str, facts: dict[str, str], plan: ContextPlan) -> ContextResult:
    """Run it."""
    print(f"context: batch of {BATCH}, starting engines ...", file=sys.stderr, flush=True)
    longest = max(plan.contexts)
    pool_tokens = 2 * BATCH * (longest + NEW_TOKENS + PAGE_TOKENS)
    common = dict(
        dtype=dtype,
        max_model_len=longest + NEW_TOKENS,
        max_num_seqs=BATCH,
        max_num_batched_tokens=BATCH * (longest + NEW_TOKENS),
        block_size=PAGE_TOKENS,
        kv_cache_memory_bytes=kv_bytes_per_token(model, dtype) * pool_tokens,
        skip_tokenizer_init=True,
    )
    engines: dict[str, EngineProcess] = {}
    milliseconds: dict[str, list[list[float]]] = {policy: [] for policy in POLICIES}
    try:
        for policy in POLICIES:
            eviction = None if policy == "off" else {"policy": policy, "budget": plan.budget_tokens}
            engines[policy] = EngineProcess(model, eviction, **common)
        for context_tokens in plan.contexts:
            prompts = _random_prompts(BATCH, context_tokens)
            for policy, engine in engines.items():
                engine.prefill(prompts)
                milliseconds[policy].append([])
            for _ in range(plan.rounds):
                for policy, engine in engines.items():
                    timing = engine.decode(prompts, NEW_TOKENS)
                    milliseconds[policy][-1].append(1000 * timing.seconds / timing.num_steps)
            last = {policy: f"{values[-1][-1]:.1f}" for policy, values in milliseconds.items()}
            print(f"  context of {context_tokens}: ms per token {last}", file=sys.stderr, flush=True)
    finally:
        for engine in engines.values():
            engine.close()
    return ContextResult(facts, BATCH, plan.budget_tokens, plan.contexts, milliseconds)


def _random_prompts(number: int, length: int) -> list[list[int]]:
    return np.random.default_rng(length).integers(1000, 40000, (number, length)).tolist()
