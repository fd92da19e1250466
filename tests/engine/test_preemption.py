"""Invariant 10: preemption and resume start over, within the budget, and every epoch is what its own trace says."""

from __future__ import annotations

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import random_prompt

POLICIES = {
    "streaming": {"policy": "streaming"},
    "h2o-exact": {"policy": "h2o", "score": "sum", "prefill_queries": "all", "score_every": 1},
    "h2o": {"policy": "h2o"},
}


@pytest.fixture(scope="module", params=[True, False], ids=["prefix-cache", "no-prefix-cache"])
def prefix_caching(request):
    return request.param


@pytest.fixture(scope="module", params=POLICIES)
def run(request, engine, prefix_caching):
    """Five requests that need five pages each in a pool of 16, then everybody is preempted twice at once."""
    eviction = POLICIES[request.param] | {"budget": 4 * P}
    with engine(eviction=eviction, num_pages=17, max_model_len=32 * P, prefix_caching=prefix_caching) as served:
        prompts = {f"r{n}": random_prompt(2 * P + 7 * n, seed=n) for n in range(5)}

        def throw_out(step):
            if step in (100, 210):
                served.scheduler.reset_prefix_cache(reset_running_requests=True)

        run = served.run(prompts, max_tokens=6 * P, before_step=throw_out)
        assert len(served.worker.eviction.table) <= 1  # who finished last is told of in the next step
    return run


@pytest.mark.parametrize("check", checks.ALWAYS, ids=lambda check: check.__name__)
def test_run(run, check):
    check(run)


@pytest.mark.parametrize("run", ["h2o-exact", "h2o"], indirect=True)
def test_masses(run):
    checks.masses(run)


def test_requests_were_preempted_with_holes_and_made_new_ones(run, prefix_caching):
    assert any(step.preempted for step in run.steps)  # for want of pages
    assert all(max(run.epochs(name)) >= 1 for name in run.answers)
    with_holes = evicted_anew = 0
    for name in run.answers:
        for epoch in run.epochs(name)[1:]:
            with_holes += bool(run.lines(name, epoch - 1))
            first = next(row for row in run.rows(name) if row.epoch == epoch)
            if not prefix_caching:
                assert first.num_computed_tokens == 0
            assert first.table.count(None) == sum(
                len(line.pages)
                for line in run.lines(name, epoch)
                if line.num_computed_tokens <= first.num_computed_tokens
            )  # no hole of an earlier life
            evicted_anew += bool(run.lines(name, epoch))
    assert with_holes >= 4 and evicted_anew >= 4


def test_tokens_do_not_change_when_nothing_was_evicted_before(engine):
    """A preemption before the first hole loses nothing: same tokens as an engine that never preempts."""
    prompts = {f"r{n}": random_prompt(P + n, seed=n) for n in range(3)}
    tokens = {}
    for preempt_at in (None, 20):
        with engine(eviction={"policy": "h2o", "budget": 3 * P}) as served:

            def throw_out(step, served=served, preempt_at=preempt_at):
                if step == preempt_at:
                    served.scheduler.reset_prefix_cache(reset_running_requests=True)

            run = served.run(prompts, max_tokens=P, before_step=throw_out)
        assert run.epochs("r0") == ([0] if preempt_at is None else [0, 1])
        checks.logits(run)
        tokens[preempt_at] = {name: answer.tokens for name, answer in run.answers.items()}
    assert tokens[None] == tokens[20]


def test_resume_with_one_token_left(engine):
    """C34: the recomputation of the whole request then yields its last token."""
    with engine(eviction={"policy": "h2o", "budget": 3 * P}) as served:
        served.begin()
        served.add("a", random_prompt(P, seed=1), max_tokens=5 * P)
        while served.scheduler.requests and (
            served.scheduler.requests[served.request_id("a")].num_output_tokens < 5 * P - 1
        ):
            served.step()
        served.scheduler.reset_prefix_cache(reset_running_requests=True)
        while served.busy:
            served.step()
        run = served.end()
    assert [row.epoch for row in run.rows("a") if row.samples][-2:] == [0, 1]
    for check in checks.ALWAYS:
        check(run)
