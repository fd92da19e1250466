"""Invariant 6, right owner: what happens to a request does not depend on its company."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Engine, Run, random_prompt

BUDGET = {"budget": 4 * P}
POLICIES = {
    "streaming": {"policy": "streaming"},
    "h2o": {"policy": "h2o"},
    "h2o-ema": {"policy": "h2o", "score": "ema", "prefill_queries": 16, "score_every": 3},
}
LENGTHS = [6 * P + 3, 5, 2 * P, 9 * P + 11, P - 1, 3 * P + 1, 7 * P, 4 * P + 20]
MAX_TOKENS = [2 * P, 5 * P, P + 5, P + 9, 4 * P, 3 * P, P, P]


def run_together(served: Engine, prompts: Mapping[str, list[int]], **arguments) -> Run:
    """All at once, yet each prompt in chunks of exactly two pages, as if it were alone."""
    served.scheduler.scheduler_config.long_prefill_token_threshold = 2 * P
    run = served.run(prompts, **arguments)
    served.scheduler.scheduler_config.long_prefill_token_threshold = 0
    return run


def history(run: Run, name: str) -> tuple:
    """What a request did: its chunks, its tokens, its evictions."""
    chunks = [(row.num_computed_tokens, row.num_scheduled_tokens) for row in run.rows(name)]
    evictions = [(line.num_computed_tokens, line.pages) for line in run.lines(name)]
    return chunks, run.answers[name].tokens, evictions


@pytest.mark.parametrize("policy", POLICIES)
def test_alone_and_in_company(engine, policy):
    """C28, second half: eight different requests, of which four end early and one comes late, so rows move."""
    prompts = {f"r{n}": random_prompt(length, seed=n) for n, length in enumerate(LENGTHS)}
    tokens = dict(zip(prompts, MAX_TOKENS, strict=True))
    with engine(eviction=BUDGET | POLICIES[policy], chunk_tokens=16 * P + 8, prefix_caching=False) as served:
        together = run_together(served, prompts, max_tokens=tokens, arrive_at={"r6": 20})
        served.chunk_tokens = 2 * P
        solo = {
            name: served.run({f"solo-{name}": prompts[name]}, max_tokens=tokens[name])
            for name in ("r0", "r1", "r3", "r6")
        }
    assert max(len(step.rows) for step in together.steps) == 8
    orders = [list(step.rows) for step in together.steps]
    assert any(  # rows did move: somebody was seen before and after the same neighbour
        a in later and b in later and (early.index(a) < early.index(b)) != (later.index(a) < later.index(b))
        for early, later in itertools.pairwise(orders)
        for a in early
        for b in early
    )
    for name in solo:
        assert history(together, name) == history(solo[name], f"solo-{name}"), name
    assert sum(len(together.lines(name)) for name in solo) > 10
    checks.logits(together)
    checks.greedy_tokens(together)
    if policy != "h2o-ema":
        checks.choices(together)
        for run in solo.values():
            if any(run.trace.get(name) for name in run.answers):
                checks.choices(run)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_eight_identical_requests(engine, policy, prefix_caching):
    """C28 and C55: in one step, with and without sharing the pages that the same step computes."""
    prompt = random_prompt(6 * P + 3, seed=1)
    with engine(eviction=BUDGET | POLICIES[policy], chunk_tokens=16 * P + 8, prefix_caching=prefix_caching) as served:
        run = run_together(served, {f"twin-{n}": prompt for n in range(8)}, max_tokens=3 * P)
    answers = {answer.tokens for answer in run.answers.values()}
    if prefix_caching:
        shared = [b for step in run.steps for b, count in step.scheduled.ref_counts.items() if count >= 7]
        assert shared  # pages with seven readers or more, of whom each evicts for itself
    else:
        assert len({repr(history(run, name)) for name in run.answers}) == 1
    # Whoever took pages from the cache has not seen their queries: h2o then judges by fewer of them, and may keep other
    # pages (each request still is what its own trace says).
    assert len(answers) == 1 or (policy == "h2o" and prefix_caching)
    for check in checks.ALWAYS:
        check(run)
