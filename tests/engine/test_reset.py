"""Invariant 10: nothing outlives its request; aborts at bad moments; the same prompt over and over."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest
import torch

import vllm_evict
from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Engine, random_prompt

PACKAGE = Path(vllm_evict.__file__).parent


def nothing_left(served: Engine) -> None:
    """No state of any request, all pages free."""
    pool = served.snapshot()
    checks.pool_state(pool)
    assert len(pool.free) == pool.num_blocks - 1 and not pool.tables
    manager = served.manager
    for state in (manager._pages, manager._over_budget, manager._new_holes):
        assert not state


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_abort_at_any_moment(engine, policy):
    """Waiting, in the first chunk, over the budget, waiting for scores, decoding with holes: one request each."""
    with engine(eviction={"policy": policy, "budget": 3 * P}) as served:
        served.begin()
        served.add("bystander", random_prompt(2 * P, seed=1), max_tokens=6 * P)
        for number in range(12):
            name = f"victim-{number}"
            served.add(name, random_prompt(5 * P + 3, seed=10 + number), max_tokens=4 * P)
            for _ in range(number):
                served.step()
            served.abort(name)
            checks.pool_state(served.snapshot(), name)
        while served.busy:
            served.step()
        served.step()
        run = served.end()
        nothing_left(served)
        assert len(served.worker.eviction.table) == 0
    run.answers = {"bystander": run.answers["bystander"]}  # vLLM reports aborted ones with what they had
    for check in (checks.logits, checks.greedy_tokens, checks.positions, checks.choices):
        check(run)
    for check in (checks.pool, checks.slots, checks.attended, checks.held_pages, checks.trace_is_the_tables):
        check(run)
    assert any(run.lines(name) for name in run.trace if name.startswith("victim"))


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_the_same_request_again_and_again(engine, policy):
    """C39: the twelfth is answered like the first, with the same evictions, and no state is left between."""
    prompt = random_prompt(4 * P + 3, seed=1)
    with engine(eviction={"policy": policy, "budget": 3 * P}, prefix_caching=False) as served:
        histories = []
        for number in range(12):
            run = served.run({f"r{number}": prompt}, max_tokens=P)
            nothing_left(served)
            lines = run.lines(f"r{number}")
            histories.append((run.answers[f"r{number}"].tokens, [(x.num_computed_tokens, x.pages) for x in lines]))
    assert histories == histories[:1] * 12
    for check in checks.ALWAYS:
        check(run)


def test_free_twice(engine):
    """vLLM frees a request once; a second time must not give pages back that others hold by now."""
    with engine(eviction={"policy": "streaming", "budget": 3 * P}) as served:
        served.begin()
        served.add("a", random_prompt(4 * P, seed=1), max_tokens=4 * P)
        for _ in range(8):
            served.step()
        request_id = served.request_id("a")
        served.abort("a")
        served.add("b", random_prompt(4 * P, seed=2), max_tokens=P)
        served.step()
        served.manager.free(request_id)
        checks.pool_state(served.snapshot())
        while served.busy:
            served.step()
        run = served.end()
    run.answers = {"b": run.answers["b"]}
    checks.logits(run)
    checks.pool(run)


def test_a_request_leaves_nothing_behind(engine):
    """What this project has allocated does not follow the number of requests, one in three of which is aborted.

    No tensor is left either, and of our own objects as many as before. A number in a dictionary hides in the noise.
    """

    def objects() -> tuple[int, int]:
        everything = gc.get_objects()
        tensors = sum(issubclass(type(each), torch.Tensor) for each in everything)
        return tensors, sum(type(each).__module__.startswith("vllm_evict") for each in everything)

    def allocated() -> int:
        gc.collect()
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{PACKAGE}/*")])
        return sum(trace.size for trace in ours.traces)

    sizes, counts = [], []
    # Without the prefix cache, of whose blocks scores are kept on purpose.
    with engine(eviction={"policy": "h2o-keydiff", "budget": 3 * P}, prefix_caching=False) as served:
        tracemalloc.start()
        try:
            for number in range(16):
                served.begin()
                for name in ("a", "b", "gone"):
                    served.add(f"{name}-{number}", random_prompt(5 * P + 3, seed=number), max_tokens=P)
                for _ in range(9):
                    served.step()
                served.abort(f"gone-{number}")
                while served.busy:
                    served.step()
                assert served.end().trace
                nothing_left(served)
                sizes.append(allocated())
                counts.append(objects())
        finally:
            tracemalloc.stop()
    assert max(counts[6:]) <= max(counts[:6]), counts
    per_request = (sizes[-1] - sizes[5]) / 30
    assert per_request < 120, sizes  # Python's own lists of freed numbers; a report of scores is over 300
