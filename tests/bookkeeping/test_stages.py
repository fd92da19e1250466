"""`StageRelay` over real gloo: the last stage reads the sum of all, step by step, and nobody waits for it.

Stages are threads here, each with process groups of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from vllm_evict.engine.stages import StageRelay

NUM_STEPS = 60
LONG_SECONDS = 300.0


class Now:
    """An array that has arrived, or the error of its device."""

    def __init__(self, values, error=None):
        self.values, self.error = values, error

    def array(self):
        if self.error is not None:
            raise self.error
        return self.values


def shapes_of(step: int) -> list[tuple[int, int]]:
    """What every stage measures in a step: nothing, a page mass, keys, both; a wide one outgrows socket buffers."""
    choice = random.Random(step)
    shapes = [(choice.randint(1, 9), choice.randint(1, 40)) for _ in range(choice.choice((0, 1, 1, 2)))]
    return [(2048, 1024), *shapes] if step == 7 else shapes


def part_of(stage: int, step: int, index: int, shape) -> np.ndarray:
    return np.random.default_rng((stage, step, index)).random(shape, dtype=np.float32)


def add_all(relay: StageRelay, stage: int, step: int):
    return [relay.add(Now(part_of(stage, step, i, shape))) for i, shape in enumerate(shapes_of(step))]


def check(sums, num_stages: int, step: int) -> None:
    for index, (total, shape) in enumerate(zip(sums, shapes_of(step), strict=True)):
        expected = sum(part_of(stage, step, index, shape).astype(np.float64) for stage in range(num_stages))
        np.testing.assert_allclose(total.array(), expected, rtol=1e-6)


def groups(num_stages: int, timeout_seconds: float) -> list[dist.ProcessGroupGloo]:
    store = dist.HashStore()

    def connect(stage: int):
        return dist.ProcessGroupGloo(store, stage, num_stages, timedelta(seconds=timeout_seconds))

    with ThreadPoolExecutor(num_stages) as threads:
        return list(threads.map(connect, range(num_stages)))


def relays(num_stages: int, timeout_seconds: float = LONG_SECONDS) -> list[StageRelay]:
    return [StageRelay(group, timeout_seconds) for group in groups(num_stages, timeout_seconds)]


def on_every_stage(num_stages: int, play: Callable) -> list:
    with ThreadPoolExecutor(num_stages) as threads:
        return list(threads.map(play, range(num_stages)))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_layers_of_all_stages_are_counted(num_stages):
    relay = relays(num_stages)
    totals = on_every_stage(num_stages, lambda stage: relay[stage].count(stage + 1))
    assert totals == [sum(range(1, num_stages + 1))] * num_stages


@pytest.mark.parametrize("num_stages", [2, 3])
def test_every_step_adds_up(num_stages):
    """As vLLM runs: a stage gets its input from the one before, and outputs are read some steps later."""
    relay, inputs = relays(num_stages), groups(num_stages, LONG_SECONDS)

    def play(stage: int) -> None:
        unread = []
        for step in range(NUM_STEPS):
            hidden = torch.full((4,), float(step))
            if stage > 0:
                received = torch.empty(4)
                inputs[stage].recv([received], stage - 1, 0).wait()
                assert received.equal(hidden)
            sums = add_all(relay[stage], stage, step)
            if stage < num_stages - 1:
                inputs[stage].send([hidden], stage + 1, 0).wait()
                continue
            unread.append((sums, step))
            if len(unread) == 5:
                for late, late_step in unread:
                    check(late, num_stages, late_step)
                unread = []
        assert not unread

    on_every_stage(num_stages, play)


def test_nobody_waits_for_the_last_stage():
    """It begins when the others are through with everything."""
    num_stages = 3
    relay = relays(num_stages)
    for stage in range(num_stages - 1):
        for step in range(NUM_STEPS):
            add_all(relay[stage], stage, step)
    sums = [add_all(relay[-1], num_stages - 1, step) for step in range(NUM_STEPS)]
    for step in reversed(range(NUM_STEPS)):
        check(sums[step], num_stages, step)


def one() -> Now:
    return Now(np.ones((1, 1), np.float32))


def test_a_silent_stage_is_named():
    relay = relays(2, timeout_seconds=2.0)
    started = time.monotonic()
    for total in [relay[1].add(one()), relay[1].add(one())]:  # the second without waiting again
        with pytest.raises(RuntimeError, match="pipeline stage 1 got no scores from stage 0 within 1 s"):
            total.array()
    assert time.monotonic() - started < 30


def test_a_stage_that_is_gone_is_named():
    first, last = groups(2, LONG_SECONDS)
    total = StageRelay(last, LONG_SECONDS).add(one())
    del first
    with pytest.raises(RuntimeError, match="pipeline stage 1 got no scores from stage 0"):
        total.array()


def test_after_a_failure_no_step_gets_the_sum_of_another():
    relay = relays(2, timeout_seconds=2.0)
    with pytest.raises(ValueError, match="device lost"):
        relay[0].add(Now(None, error=ValueError("device lost"))).array()
    relay[0].add(Now(np.full((1, 1), 7, np.float32)))
    with pytest.raises(RuntimeError, match="got no scores from stage 0"):
        relay[1].add(one()).array()
