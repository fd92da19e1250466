"""What scheduler and worker tell each other: scores one way, holes the other (invariants 6 and 10)."""

import math
import pickle
from collections import Counter

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from vllm_evict.engine.messages import PageScores, ScoreReport, attach_report, report_of, update_of

POLICIES = ("streaming", "h2o", "random")
each_policy = pytest.mark.parametrize("policy", POLICIES)
sync_and_async = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


# ---- reports of scores (h2o) ----


@sync_and_async
def test_scores_are_asked_for_while_a_request_is_over_its_budget_and_only_then(bench, async_scheduling):
    run = bench(policy="h2o", async_scheduling=async_scheduling, num_blocks=40)
    run.add("a", 30, 20)
    run.add("b", 18, 20)
    run.add("short", 5, 5)
    while run.scheduler.has_unfinished_requests():
        step = run.step()
        over = {request_id for request_id in ("a", "b", "short") if step.held.get(request_id, 0) > 4}
        # Of one that sits out its last report may still be on its way.
        sits_out = over - step.output.num_scheduled_tokens.keys() if async_scheduling else set()
        assert over - sits_out <= step.update.wanted.keys() <= over and not any(step.update.wanted.values())
    assert sum("a" in step.update.wanted for step in run.steps) > 4
    assert not any("short" in step.update.wanted for step in run.steps)


@pytest.mark.parametrize("policy", ["streaming", "random"])
def test_who_needs_no_scores_asks_for_none(bench, policy):
    run = bench(policy=policy)
    run.add("a", 30, 20)
    run.run()
    assert not any(step.update.wanted for step in run.steps)


def over_budget(bench, **options):
    """A request over its budget whose report has not come yet."""
    run = bench(policy="h2o", **options)
    run.add("a", 30, 20)
    run.step()
    step = run.schedule()
    assert step.update.wanted == {"a": 0} and run.drawn("a") == "oooooooo"
    return run, step


def report(pages, scores, epoch=0):
    values = np.array(list(scores), dtype=np.float64)
    return PageScores(epoch, np.array(list(pages), dtype=np.int32), {"attention": values})


def test_the_report_decides(bench):
    """Pages 1 to 5 are open, four have to go."""
    run, step = over_budget(bench)
    attach_report(step.runner_output, ScoreReport({"a": report(range(8), [0, 1, 9, 2, 8, 3, 0, 0])}))
    run.process()
    run.schedule()
    assert run.drawn("a") == "o.o...oo"


def test_without_its_report_it_waits_and_asks_again(bench):
    run, step = over_budget(bench)
    attach_report(step.runner_output, ScoreReport({}))
    run.process()
    update = update_of(run.scheduler.schedule())
    assert update.wanted == {"a": 0} and not update.holes and run.drawn("a") == "oooooooo"


@pytest.mark.parametrize(
    "stale",
    [
        {"a": report(range(8), range(8), epoch=1)},
        {"a": report(range(8), range(8), epoch=-1)},
        {"nobody": report(range(8), range(8))},
        {"waiting": report(range(8), range(8))},
    ],
    ids=["later epoch", "earlier epoch", "unknown request", "request without pages"],
)
def test_a_stale_report_is_dropped(bench, stale):
    run, step = over_budget(bench)
    run.add("waiting", 5, 5)
    attach_report(step.runner_output, ScoreReport(stale))
    run.process()
    assert run.manager._pages["a"].scores is None and run.manager._pages["a"].awaits_scores
    assert set(run.manager._pages) == {"a"}
    run.abort("a")
    run.run()


def test_a_report_from_before_a_preemption_is_dropped_after_it(bench):
    """Async: it is under way while the request is preempted and comes back with other pages."""
    run = bench(policy="h2o", async_scheduling=True, num_blocks=40)
    run.add("a", 30, 20)
    run.step()
    run.step()
    assert run.pending[-1][0].kv_eviction.wanted == {"a": 0}
    request = run.preempt("a")
    run.process()  # the stale report
    assert request.num_preemptions == 1 and run.manager._pages == {}
    step = run.schedule()
    assert run.drawn("a") == "o...oooo" and run.manager._pages["a"].scores is None
    assert step.update.wanted == {"a": 1}  # asked for anew, under a new epoch
    run.run()


def test_a_report_older_than_the_last_eviction_is_matched_by_page(bench):
    """It names pages that are gone, and does not know the newest: those are on trial."""
    run, step = over_budget(bench)
    weights = {0: 0.0, 1: 0.5, 2: 0.1, 3: 0.4, 4: 0.2, 5: 0.3, 6: 0.9, 7: 0.9}
    attach_report(step.runner_output, ScoreReport({"a": report(weights, weights.values())}))
    run.process()
    run.run_until(lambda: run.drawn("a") == "oo....ooo")
    late = report([1, 2, 3, 5, 6], [0.9, 0.0, 0.0, 0.0, 0.8])
    run.manager.receive_scores("a", late)
    run.step()
    assert run.drawn("a") == "oo.....oo"  # page 6 is the lightest judged one, pages 7 and 8 are recent


# ---- what the worker is told ----


@each_policy
def test_holes_are_shipped_once_in_the_step_they_are_made(bench, policy):
    run = bench(policy=policy)
    run.add("a", 30, 25)
    run.add("b", 5, 30)
    told = Counter()
    while run.scheduler.has_unfinished_requests():
        before = {r: set(run.holes(r)) for r in ("a", "b")}
        step = run.schedule()
        for request_id in ("a", "b"):
            made = set(run.holes(request_id)) - before[request_id]
            assert set(step.update.holes.get(request_id, ())) == made
            told.update((request_id, page) for page in step.update.holes.get(request_id, ()))
        run.process()
    assert told and set(told.values()) == {1}


@each_policy
def test_a_request_that_sits_a_step_out_is_trimmed_and_its_worker_told(bench, policy):
    run = bench(policy=policy, num_blocks=40)
    run.add("over", 30, 20)
    run.add("other", 3, 20)
    run.step()
    run.step()
    # As vLLM does to pace pipeline stages.
    run.scheduler.requests["over"].next_decode_eligible_step = run.scheduler.current_step + 2
    step = run.step()
    assert list(step.output.num_scheduled_tokens) == ["other"] and len(step.update.holes["over"]) == 4
    assert len(run.table["over"].pages) == 4
    run.run()
    assert len(run.finished["over"]) == 20


@each_policy
def test_what_a_request_gives_up_does_not_depend_on_its_company(bench, policy):
    """Invariant 6: the same holes at the same length, alone and beside seven others."""

    def holes(run):
        made = []
        while "a" in run.scheduler.requests:
            step = run.step()
            if "a" in step.update.holes:
                made.append((run.table["a"].num_computed_tokens, step.update.holes["a"]))
        return made

    alone = bench(policy=policy, chunk_tokens=256, num_blocks=200)
    alone.add("a", 30, 25)
    crowd = bench(policy=policy, chunk_tokens=256, num_blocks=200)
    for i in range(3):
        crowd.add(f"before {i}", 20 + i, 30)
    crowd.add("a", 30, 25)
    for i in range(4):
        crowd.add(f"after {i}", 13 + i, 10)
    expected = holes(alone)
    assert len(expected) > 4 and holes(crowd) == expected


# ---- how it travels ----


def test_updates_and_reports_survive_pickling(bench):
    """vLLM sends both objects between processes."""
    run, step = over_budget(bench)
    attach_report(step.runner_output, ScoreReport({"a": report(range(8), [0, 1, 9, 2, 8, 3, math.nan, 0])}))
    sent = pickle.loads(pickle.dumps(step.runner_output))
    assert sent.req_ids == step.runner_output.req_ids
    arrived = report_of(sent).scores["a"]
    assert arrived.epoch == 0 and arrived.pages.tolist() == list(range(8))
    np.testing.assert_array_equal(arrived.signals["attention"], [0, 1, 9, 2, 8, 3, math.nan, 0])
    run.pending[0] = (step.output, sent)
    run.process()
    step = run.schedule()
    assert update_of(pickle.loads(pickle.dumps(step.output))) == step.update
    assert step.update.holes == {"a": (1, 3, 4, 5)}


def test_what_another_scheduler_or_runner_made_carries_nothing():
    assert update_of(SchedulerOutput.make_empty()) is None
    assert report_of(EMPTY_MODEL_RUNNER_OUTPUT) is None
