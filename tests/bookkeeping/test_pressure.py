"""A floor below the budget: when the pool is short, pages go before work does."""

import pytest
from vllm.v1.core.sched.request_queue import SchedulingPolicy

from tests.bookkeeping.harness import PAGE_TOKENS as P
from tests.bookkeeping.harness import score_of

UNLIMITED = {"budget": "unlimited", "floor": 4 * P, "sink": P, "recent": 2 * P}


def grow(run, names="ab", prompt_pages=4, max_tokens=8 * P):
    for name in names:
        run.add(name, prompt_pages * P, max_tokens)
    run.run()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["streaming", "h2o", "random"])
def test_nothing_goes_while_there_is_room(bench, policy, async_scheduling):
    run = bench(policy=policy, settings=UNLIMITED, num_blocks=26, async_scheduling=async_scheduling)
    grow(run)
    assert run.manager.stats.num_evicted_pages == 0
    assert run.peak_pages == 12


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["streaming", "h2o", "random"])
def test_pages_go_before_work_does(bench, policy, async_scheduling):
    """Two requests that end with 12 pages each, in 16: with a floor nobody is preempted, without one somebody is."""
    for floor, preempted in ((4 * P, False), (None, True)):
        settings = {"budget": 12 * P, "sink": P, "recent": 2 * P} | ({"floor": floor} if floor else {})
        run = bench(policy=policy, settings=settings, num_blocks=17, async_scheduling=async_scheduling)
        grow(run)
        assert sorted(run.finished) == ["a", "b"] and all(len(tokens) == 8 * P for tokens in run.finished.values())
        assert any(step.output.preempted_req_ids for step in run.steps) == preempted
        assert (run.manager.stats.num_evicted_pages > 0) == (floor is not None)
        saved = run.manager.stats.take_report(P).get("preemptions_saved", 0)
        assert (saved > 0) == (floor is not None)


def test_the_least_valuable_page_of_all_goes_first(bench):
    """Page scores of both requests compete; streaming gives up the page that lies farthest back."""
    run = bench(policy="h2o", settings=UNLIMITED, num_blocks=17, chunk_tokens=32)
    run.add("a", 7 * P, 4 * P)
    run.add("b", 7 * P, 4 * P)
    run.run_until(lambda: run.manager.stats.num_evicted_pages > 0)
    taken = {(name, page) for name in "ab" for page in run.holes(name)}
    evictable = {(name, page) for name in "ab" for page in range(1, 6)}
    assert taken and taken <= evictable
    by_score = sorted(evictable, key=lambda place: score_of(*place))
    assert taken == set(by_score[: len(taken)])


def test_never_below_the_floor(bench):
    run = bench(settings=UNLIMITED, num_blocks=13, chunk_tokens=8)
    for name in "abc":
        run.add(name, 4 * P, 10 * P)
    run.run()
    assert sorted(run.finished) == ["a", "b", "c"]
    assert run.manager.stats.num_evicted_pages > 0
    for before, step in zip(run.steps, run.steps[1:], strict=False):
        for name in step.update.holes.keys() & before.held.keys() & step.held.keys():
            assert step.held[name] >= 4 and step.held[name] >= before.held[name] - len(step.update.holes[name])


def test_a_page_that_another_needs_is_not_taken(bench):
    """One of two giving it up frees nothing, and the other is at its floor."""
    run = bench(settings=UNLIMITED | {"overrides": "any"}, num_blocks=17, chunk_tokens=32)
    prompt = list(range(8 * P))
    run.add("a", prompt, 6 * P)
    run.step()
    run.add("keeps", prompt, 6 * P, {"kv_eviction": "none"})
    run.run_until(lambda: run.manager.stats.num_evicted_pages > 0)
    assert min(run.holes("a")) >= 7  # the last page is never a hit
    assert run.holes("keeps") == []
    run.run()


def test_what_all_holders_can_spare_goes_for_all_of_them(bench):
    """Six branches of one prompt of 24 pages: nothing else is there to give."""
    run = bench(settings=UNLIMITED, num_blocks=31, max_model_len=128)
    text = list(range(24 * P))
    run.add("0", text, 3 * P)
    run.run_until(lambda: run.scheduler.requests["0"].num_output_tokens > 0)
    for branch in "12345":
        run.add(branch, text, 3 * P)
    run.run()
    assert run.manager.stats.num_evicted_pages > 0
    assert sum(len(step.output.preempted_req_ids or ()) for step in run.steps) <= 1


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("first", "second", "num_blocks"), [(24, 21, 18), (27, 20, 17), (26, 22, 18), (25, 23, 17)])
def test_a_page_that_the_step_fills_is_not_hashed_over_a_new_hole(bench, first, second, num_blocks, async_scheduling):
    """Hashed when its slots were given out, before another request of the same step was short (the harness checks)."""
    run = bench(settings=UNLIMITED, num_blocks=num_blocks, chunk_tokens=32, async_scheduling=async_scheduling)
    run.add("a", first, 24)
    run.add("b", second, 24)
    run.run()
    assert run.manager.stats.num_evicted_pages > 0


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("budget", ["unlimited", 40 * P])
def test_a_hit_too_long_for_the_pool_is_taken_in_part(bench, budget, async_scheduling):
    """All 11 pages and a chunk do not fit in 12; who waits for that waits for ever, and so does everyone behind."""
    settings = UNLIMITED | {"budget": budget}
    run = bench(settings=settings, num_blocks=13, chunk_tokens=8, max_model_len=200, async_scheduling=async_scheduling)
    text = list(range(11 * P))
    run.add("first", text, 1)
    run.run()
    run.add("long", text + list(range(300, 340)), 2)
    run.add("behind", P, 2)
    run.run(max_steps=60)
    assert sorted(run.finished) == ["behind", "first", "long"]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_preempted_alone_it_comes_back(bench, async_scheduling):
    run = bench(settings=UNLIMITED, num_blocks=16, chunk_tokens=8, max_model_len=300, async_scheduling=async_scheduling)
    run.add("a", 100, 8)
    for _ in range(6):
        run.step()
    run.preempt("a")
    run.run(max_steps=100)
    assert len(run.finished["a"]) == 8


@pytest.mark.parametrize("caching", [False, True], ids=["no-prefix", "prefix"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_windows_beside_it_count_too(bench, async_scheduling, caching):
    """What is needed is needed of all groups."""
    run = bench(
        settings=UNLIMITED,
        num_blocks=26,
        chunk_tokens=8,
        max_model_len=300,
        async_scheduling=async_scheduling,
        window_tokens=9,
        caching=caching,
    )
    run.add("a", 200, 2)
    run.run(max_steps=100)
    assert run.manager.stats.num_evicted_pages > 0
    assert not any(step.output.preempted_req_ids for step in run.steps)


def test_the_less_important_gives_first(bench):
    run = bench(settings=UNLIMITED, num_blocks=17, chunk_tokens=32)
    run.scheduler.policy = SchedulingPolicy.PRIORITY
    run.add("important", 7 * P, 6 * P).priority = 0
    run.step()
    run.add("batch", 7 * P, 6 * P).priority = 9
    run.run_until(lambda: run.manager.stats.num_evicted_pages > 2)
    assert run.holes("batch") and not run.holes("important")
    run.run()


def test_a_prompt_longer_than_the_pool_trims_itself(bench):
    run = bench(settings=UNLIMITED, num_blocks=12, chunk_tokens=8, max_model_len=200)
    run.add("a", 150, 8)
    run.run(max_steps=200)
    assert len(run.finished["a"]) == 8
    assert not any(step.output.preempted_req_ids for step in run.steps)


def test_scores_are_asked_for_before_the_pool_is_empty(bench):
    run = bench(policy="h2o", settings=UNLIMITED, num_blocks=17, chunk_tokens=32)
    run.add("a", 7 * P, 12 * P)
    asked = [step for step in (run.step() for _ in range(7 * P)) if "a" in step.update.wanted]
    assert asked and all(len(run.pool.blocks) for _ in asked)
    assert run.manager.stats.num_evicted_pages == 0
    assert len(asked) <= 4  # once per new page, not once per step
