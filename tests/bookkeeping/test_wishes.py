"""What one request asks for itself: its own budget, its own policy, pages that stay."""

import pytest

from tests.bookkeeping.harness import PAGE_TOKENS as P

ANY = {"overrides": "any"}


def test_a_lower_budget_is_kept_beside_the_server_s(bench):
    run = bench(num_blocks=40)
    run.add("small", 8 * P, 4 * P, {"kv_eviction_budget": 3 * P})
    run.add("usual", 8 * P, 4 * P)
    run.run_until(
        lambda: len(run.scheduler.running) == 2 and all(r.num_output_tokens > 2 for r in run.scheduler.running)
    )
    assert len(run.resident("small")) in (3, 4) and len(run.resident("usual")) in (4, 5)
    run.run()


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_none_keeps_everything(bench, policy):
    run = bench(policy=policy, num_blocks=40, settings=ANY)
    run.add("all", 8 * P, 4 * P, {"kv_eviction": "none"})
    run.add("usual", 8 * P, 4 * P)
    run.run()
    holes = {name for step in run.steps for name in step.update.holes}
    assert holes == {"usual"}
    assert run.peak_pages == 12


def test_streaming_on_an_h2o_server(bench):
    run = bench(policy="h2o", num_blocks=40, settings=ANY)
    run.add("a", 8 * P, 4 * P, {"kv_eviction": "streaming"})
    run.run_until(lambda: run.scheduler.requests["a"].num_output_tokens == 2)
    assert run.drawn("a") == "o....oooo"[: len(run.blocks("a"))] or run.holes("a") == list(
        range(1, 1 + len(run.holes("a")))
    )
    assert not any(step.update.wanted for step in run.steps)
    run.run()


@pytest.mark.parametrize("policy", ["streaming", "h2o", "random"])
def test_pinned_pages_stay(bench, policy):
    run = bench(policy=policy, num_blocks=40)
    run.add("a", 8 * P, 8 * P, {"kv_eviction_pin": f"{3 * P}-{3 * P}"})  # the harness checks after every step
    run.run_until(lambda: run.scheduler.requests["a"].num_output_tokens == 7 * P)
    assert 3 in run.resident("a") and 0 in run.resident("a")
    assert len(run.resident("a")) in (4, 5)
    run.run()


def test_a_wish_that_went_round_the_front_end_is_not_granted(bench, caplog):
    run = bench(num_blocks=40)
    request = run.add("a", 8 * P, 4 * P)
    request.sampling_params.extra_args = {"kv_eviction": "none"}
    run.run()
    assert run.manager.stats.num_evicted_pages > 0
    assert len(run.finished["a"]) == 4 * P


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_admission_counts_what_a_request_may_hold(bench, policy):
    """A request without eviction waits until its whole prompt fits; one with eviction does not have to."""
    run = bench(policy=policy, num_blocks=17, settings=ANY, chunk_tokens=8)
    run.add("first", 4 * P, 4 * P)
    run.step()
    run.add("all", 14 * P, 1, {"kv_eviction": "none"})
    run.step()
    assert [r.request_id for r in run.scheduler.running] == ["first"]
    run.run()
    assert sorted(run.finished) == ["all", "first"]
