"""`vllm-evict bench scheduler` measures what it says it does."""

import pytest

from vllm_evict.bench.load import PAGE_TOKENS, POLICIES
from vllm_evict.bench.scheduler import STEPS_PER_TURN, SchedulerRun, measure


def make_runs(model, context_tokens, turns):
    return {
        policy: SchedulerRun(model, policy, 8 * PAGE_TOKENS, context_tokens, turns * STEPS_PER_TURN)
        for policy in POLICIES
    }


@pytest.mark.parametrize(("context_pages", "evicted_per_turn"), [(10, 1), (1, 0)])
def test_every_request_decodes_and_loses_a_page_per_turn_over_budget(model_path, context_pages, evicted_per_turn):
    contexts = [context_pages * PAGE_TOKENS + i for i in range(5)]
    runs = make_runs(model_path, contexts, turns=3)
    milliseconds = measure(runs, rounds=2)
    for policy, run in runs.items():
        assert len(milliseconds[policy]) == 2 and min(milliseconds[policy]) > 0
        assert len(run.scheduler.running) == len(contexts), "all of them, to the end"
        assert all(r.num_output_tokens > 3 * STEPS_PER_TURN for r in run.scheduler.running)
        assert run.num_evicted_pages == (0 if policy == "off" else 2 * evicted_per_turn * len(contexts))
        if evicted_per_turn and policy != "off":
            evictor = run.scheduler.page_evictor
            assert {evictor.resident_pages(request.request_id) for request in run.scheduler.running} <= {8, 9}
