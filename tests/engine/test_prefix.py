"""Invariants 3 and 4: the prefix cache holds only what everybody would have computed, and shared pages stay shared."""

from __future__ import annotations

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import random_prompt


@pytest.fixture(params=["streaming", "h2o"])
def eviction(request):
    return {"policy": request.param, "budget": 4 * P}


def check_all(run):
    for check in checks.ALWAYS if any(run.trace.get(name) for name in run.answers) else checks.QUIET:
        check(run)


def test_nothing_computed_after_a_hole_is_found(engine, eviction):
    """The whole first conversation is sent again: only its part before the first hole is a hit, and that is exact."""
    with engine(eviction=eviction) as served:
        first = served.run({"first": random_prompt(3 * P, seed=1)}, max_tokens=6 * P)
        conversation = list(first.answers["first"].prompt + first.answers["first"].tokens)
        second = served.run({"second": conversation + random_prompt(5, seed=2)}, max_tokens=P)
    first_hole_at = first.lines("first")[0].num_computed_tokens
    assert first_hole_at == 4 * P + 1
    assert second.rows("second")[0].num_cached_tokens == 4 * P
    check_all(first)
    check_all(second)


def test_hit_longer_than_the_budget(engine, eviction):
    """Computed in one chunk, 12 pages are exact. Three requests hit them, each holding the budget and not the hit."""
    prefix = random_prompt(12 * P, seed=1)
    with engine(eviction=eviction, chunk_tokens=14 * P, num_pages=26, max_model_len=32 * P) as served:
        first = served.run({"first": [*prefix, 7]}, max_tokens=1)
        prompts = {f"hit-{n}": prefix + random_prompt(P + n, seed=n) for n in range(3)}
        run = served.run(prompts, max_tokens=3 * P)
    check_all(first)
    check_all(run)
    for name in prompts:
        row = run.rows(name)[0]
        assert row.num_cached_tokens == 12 * P
        assert row.table[:12].count(None) == 8
        assert run.lines(name)[0].num_computed_tokens == 12 * P
    assert not any(step.preempted for step in run.steps)
    assert any(len(step.rows) == 3 for step in run.steps)


def test_long_hits_do_not_pin_the_pool(engine, eviction):
    """14 usable pages, of which a hit of 10 would pin 10 per reader; two readers of different prefixes run together."""
    prefixes = [random_prompt(10 * P, seed=n) for n in range(2)]
    with engine(eviction=eviction, chunk_tokens=10 * P + 1, num_pages=30, max_model_len=32 * P) as served:
        for n, prefix in enumerate(prefixes):
            check_all(served.run({f"first-{n}": [*prefix, 7]}, max_tokens=1))
        prompts = {f"hit-{n}": prefix + random_prompt(9, seed=n) for n, prefix in enumerate(prefixes)}
        run = served.run(prompts, max_tokens=2 * P)
    check_all(run)
    assert [run.rows(name)[0].num_cached_tokens for name in prompts] == [10 * P, 10 * P]
    assert max(sum(count > 0 for count in step.scheduled.ref_counts.values()) for step in run.steps) <= 10


def test_evicting_a_shared_page_drops_one_reference(engine, eviction):
    """Two readers of one prefix; the first evicts shared pages while the second still reads them."""
    prefix = random_prompt(4 * P, seed=1)
    with engine(eviction=eviction) as served:
        run = served.run(
            {"first": prefix + random_prompt(5, seed=2), "second": prefix + random_prompt(7, seed=3)},
            max_tokens={"first": 5 * P, "second": 5 * P},
            arrive_at={"second": P // 2},
        )
    check_all(run)
    assert run.rows("second")[0].num_cached_tokens == 4 * P
    first_holes = [
        step
        for step in run.steps
        if len(step.rows) == 2
        and any(
            mine is None and theirs is not None
            for mine, theirs in zip(step.rows["first"].table, step.rows["second"].table, strict=False)
        )
    ]
    assert first_holes  # one had let go of a page that the other still held


def test_evicted_page_is_found_until_it_is_overwritten(engine, eviction):
    """C52 and C53: holes of one request cost the next one nothing while the content lasts, and nothing stale after."""
    prompt = random_prompt(9 * P + 5, seed=1)
    with engine(eviction=eviction, chunk_tokens=10 * P, num_pages=40, max_model_len=32 * P) as served:
        runs = [served.run({"first": prompt}, max_tokens=2 * P)]
        runs.append(served.run({"second": prompt}, max_tokens=P))
        assert runs[1].rows("second")[0].num_cached_tokens == 9 * P
        flood = {f"flood-{n}": random_prompt(8 * P, seed=10 + n) for n in range(5)}
        runs.append(served.run(flood, max_tokens=2))
        runs.append(served.run({"third": prompt}, max_tokens=P))
        assert runs[3].rows("third")[0].num_cached_tokens < 9 * P
    for run in runs:
        check_all(run)
    assert runs[0].answers["first"].tokens[0] == runs[3].answers["third"].tokens[0]


def test_cached_prefix_survives_evicting_neighbours(engine, eviction):
    """C51: freed pages without a hash are used first, so a cached prompt outlives five long answers."""
    prompt = [*random_prompt(6 * P, seed=1), 3]
    with engine(eviction=eviction, num_pages=64, chunk_tokens=8 * P) as served:
        served.run({"first": prompt}, max_tokens=1)
        check_all(served.run({f"long-{n}": random_prompt(P // 2, seed=n) for n in range(5)}, max_tokens=12 * P))
        again = served.run({"again": prompt}, max_tokens=P)
    assert again.rows("again")[0].num_cached_tokens >= 5 * P
    check_all(again)


def test_reset_of_the_prefix_cache(engine, eviction):
    """C40: after a reset the same prompt is computed anew, and a running request with holes is none the worse."""
    prompt = random_prompt(6 * P + 3, seed=1)
    with engine(eviction=eviction) as served:
        cold = served.run({"cold": prompt}, max_tokens=P)
        assert served.llm.llm_engine.reset_prefix_cache()
        after = served.run({"after": prompt}, max_tokens=P)
    assert after.rows("after")[0].num_cached_tokens == 0
    assert after.answers["after"].tokens == cold.answers["cold"].tokens
    check_all(cold)
    check_all(after)
