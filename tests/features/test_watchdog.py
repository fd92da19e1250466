"""C63: 500 mixed requests at more than the pool can take. Nobody waits beside free pages; the backlog drains."""

from __future__ import annotations

import random

import pytest

from tests.bookkeeping.conftest import model_path, stock_config  # noqa: F401  fixtures, for this package too
from tests.bookkeeping.harness import PAGE_TOKENS, Bench


def stalled(run: Bench) -> bool:
    """Somebody waits, nobody runs, and there is room for the first one's whole bound."""
    num_running, num_waiting = run.scheduler.get_request_counts()
    return num_waiting > 0 and num_running == 0 and run.pool.get_num_free_blocks() >= run.max_pages


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_never_two_idle_steps_in_a_row(stock_config, policy, async_scheduling):  # noqa: F811
    rng = random.Random(7)
    run = Bench(stock_config, policy=policy, async_scheduling=async_scheduling, num_blocks=40, max_seqs=8)
    texts = [[rng.randrange(400) for _ in range(60)] for _ in range(6)]
    served = idle = number = 0
    for _ in range(12_000):
        live = len(run.scheduler.requests)
        if number < 500 and live < 12:  # three for every two that fit
            prompt = texts[rng.randrange(6)][: rng.randrange(1, 40)] + [rng.randrange(400)] * rng.randrange(1, 12)
            run.add(f"r{number}", prompt, rng.randrange(1, 12))
            number += 1
        if not run.scheduler.has_unfinished_requests():
            break
        running = sorted(run.scheduler.requests)
        disturbance = rng.random()
        if disturbance < 0.01:
            run.abort(rng.choice(running))
        elif disturbance < 0.03 and run.scheduler.running:
            run.preempt(rng.choice(run.scheduler.running).request_id)
        idle = idle + 1 if stalled(run) else 0
        assert idle <= 2, f"request {number}: nothing runs"
        run.step()
        served += 1
    assert number == 500 and not run.scheduler.has_unfinished_requests()
    assert max(sum(step.held.values()) for step in run.steps) > 0.9 * 39
    assert PAGE_TOKENS == 4 and served > 500
