"""C26: a model whose layers slide in turn; eviction acts on the full-attention layers only."""

from __future__ import annotations

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import random_prompt


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_sliding_layers_keep_their_own_window(engine, policy):
    with engine("tiny-swa", eviction={"policy": policy, "budget": 4 * P}, num_pages=200) as served:
        run = served.run({"a": random_prompt(9 * P + 3, seed=1), "b": random_prompt(P, seed=2)}, max_tokens=5 * P)
        assert len(served.runner.kv_cache_config.kv_cache_groups) == 2
    skipped = (checks.pool, checks.written_once)  # the other group shares the pool
    for check in checks.ALWAYS:
        if check not in skipped:
            check(run)
    if policy == "h2o":
        checks.masses(run)
    for step in run.steps:
        free, used = len(step.settled.free), sum(count > 0 for count in step.settled.ref_counts.values())
        assert free + used + 1 == step.settled.num_blocks


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_window_pages_computed_after_a_hole_are_not_found(engine, policy):
    """Invariant 3 over both groups: what a sliding layer wrote after a hole saw less, too."""
    with engine("tiny-swa", eviction={"policy": policy, "budget": 4 * P}, num_pages=200) as served:
        first = served.run({"first": random_prompt(3 * P, seed=1)}, max_tokens=6 * P)
        conversation = first.answers["first"].prompt + first.answers["first"].tokens
        second = served.run({"second": [*conversation, *random_prompt(5, seed=2)]}, max_tokens=P)
    assert second.rows("second")[0].num_cached_tokens <= 4 * P
    for run in (first, second):
        for check in (checks.logits, checks.greedy_tokens, checks.choices):
            check(run)
