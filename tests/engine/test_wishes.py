"""Per-request control and the floor, through vLLM's front end in process, judged by the mask oracle."""

from __future__ import annotations

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import random_prompt

# Those that hold whatever each request's budget is.
NOT_BY_BUDGET = (checks.logits, checks.greedy_tokens, checks.positions, checks.pool, checks.slots, checks.attended)


def test_a_request_that_can_never_fit_is_refused_at_once(engine):
    """40 usable pages. Without eviction a request of 50 pages would preempt itself for ever."""
    from vllm.exceptions import VLLMValidationError

    none = {"extra_args": {"kv_eviction": "none"}}
    with engine(eviction={"policy": "streaming", "budget": 4 * P, "overrides": "any"}, num_pages=41) as served:
        served.begin()
        with pytest.raises(VLLMValidationError, match=r"take 50 pages at once .* has 40 of 32 tokens"):
            served.add("never", random_prompt(30 * P, seed=1), max_tokens=20 * P, sampling=none)
        served.add("just", random_prompt(38 * P, seed=1), max_tokens=2 * P, sampling=none)
        served.add("usual", random_prompt(30 * P, seed=2), max_tokens=P)
        while served.busy:
            served.step()
        run = served.end()
    assert not run.lines("just") and run.lines("usual")
    for check in NOT_BY_BUDGET:
        check(run)


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_under_pressure_answers_are_those_of_the_mask(engine, policy):
    """Four requests that would take 40 pages in a pool of 28: pages go, nobody is preempted."""
    eviction = {"policy": policy, "budget": "unlimited", "floor": 5 * P}
    with engine(eviction=eviction, num_pages=29) as served:
        prompts = {f"r{n}": random_prompt(5 * P + n, seed=n) for n in range(4)}
        run = served.run(prompts, max_tokens=5 * P)
        alone = served.run({"alone": random_prompt(5 * P, seed=9)}, max_tokens=6 * P)
    assert {line.reason for name in prompts for line in run.lines(name)} == {"pressure"}
    assert not any(step.preempted for step in run.steps)
    for check in NOT_BY_BUDGET:
        check(run)
    assert not alone.lines("alone")


def test_offline_runs_have_metrics(engine):
    from prometheus_client import REGISTRY

    with engine(eviction={"policy": "h2o", "budget": 4 * P}, disable_log_stats=False) as served:
        run = served.run({"a": random_prompt(8 * P, seed=1)}, max_tokens=2 * P)
    labels = {"model_name": str(served.model), "engine": "0", "policy": "h2o", "reason": "budget"}
    pages = REGISTRY.get_sample_value("vllm:kv_eviction_evicted_pages_total", labels)
    assert pages == sum(len(line.pages) for line in run.lines("a")) > 0
