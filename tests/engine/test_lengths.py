"""Every prompt length across two page boundaries, and the shortest prompts, at the smallest budget there is."""

from __future__ import annotations

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import random_prompt

LENGTHS = [*range(2 * P - 2, 4 * P + 3)]
SHORT = [1, 2, 3, P - 1, P, P + 1]
BUDGET = {"budget": 2 * P, "sink": 4, "recent": 1}  # one page of sinks, one of recent tokens


@pytest.fixture(scope="module", params=["streaming", "h2o"])
def run(request, engine):
    eviction = BUDGET | {"policy": request.param}
    prompts = {f"length-{n}": random_prompt(n, seed=n) for n in LENGTHS + SHORT}
    tokens = {f"length-{n}": P + 2 for n in LENGTHS} | {f"length-{n}": 2 * P for n in SHORT}
    with engine(eviction=eviction, chunk_tokens=3 * P, max_num_seqs=24, num_pages=256) as served:
        return served.run(prompts, max_tokens=tokens)


@pytest.mark.parametrize("check", checks.ALWAYS, ids=lambda check: check.__name__)
def test_run(run, check):
    check(run)


def test_short_prompts_are_unevicted_until_the_budget(run):
    """C34: a one-token prompt is a prefill, its next step a decode; nothing special happens to either."""
    for n in SHORT:
        name = f"length-{n}"
        first_hole = min((line.num_computed_tokens for line in run.lines(name)), default=None)
        # The third page opens with position 2P; it is over the budget when the next step begins, if there is one:
        # n + 2P - 1 tokens are computed in all.
        assert first_hole == (2 * P + 1 if n > 2 else None)
