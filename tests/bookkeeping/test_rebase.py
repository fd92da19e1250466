"""Positions that rebase, in the scheduler's books and the worker's: `RebasingBench` checks after every step."""

import numpy as np
import pytest

from tests.bookkeeping.harness import PAGE_TOKENS as P
from tests.bookkeeping.harness import configured, make_prompt, make_scheduler
from tests.bookkeeping.rebasing import RebasingBench
from vllm_evict.config import EvictionConfig, EvictionConfigError
from vllm_evict.engine.messages import PageCopy, Rebase
from vllm_evict.engine.resident import ResidentRequest
from vllm_evict.engine.sizing import check_positions, model_limit

SYNC_AND_ASYNC = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def request(pages, block_ids, rotary_pages, num_pages, offset_pages=0):
    as_int32 = lambda numbers: np.asarray(numbers, dtype=np.int32)  # noqa: E731
    return ResidentRequest(
        0,
        0,
        as_int32(pages),
        as_int32(block_ids),
        num_pages,
        num_computed_tokens=num_pages * P,
        rotary_pages=as_int32(rotary_pages),
        offset_pages=offset_pages,
    )


# ---- by hand ----


def test_the_workers_side():
    """Pages 0 4 5 6 of 7, and page 7 that the step opens: 4 5 6 go to 1 2 3, and 7 is written at 4."""
    seen = request([0, 4, 5, 6], [10, 14, 15, 16], [0, 4, 5, 6], 7)
    seen.append([17])
    moves = seen.rebase(Rebase(3, (0, 4, 5, 6), (PageCopy(5, 15, 25),)))
    assert seen.block_ids.tolist() == [10, 14, 25, 16, 17]
    assert seen.rotary_pages.tolist() == [0, 1, 2, 3, 4] and seen.offset_pages == 3
    assert (moves.sources.tolist(), moves.copies.tolist()) == ([15], [25])
    assert (moves.block_ids.tolist(), moves.pages_down.tolist()) == ([14, 25, 16], [3, 3, 3])
    seen.append([18])
    assert seen.rotary_pages.tolist()[-1] == 8 - 3


def test_rebases_compose():
    seen = request([0, 4, 9, 10], [1, 2, 3, 4], [0, 1, 6, 7], 11, offset_pages=3)
    moves = seen.rebase(Rebase(7, (0, 4, 9, 10)))
    assert seen.rotary_pages.tolist() == [0, 1, 2, 3] and seen.offset_pages == 7
    assert (moves.block_ids.tolist(), moves.pages_down.tolist()) == ([3, 4], [4, 4])  # page 4 stands right already


def test_a_page_that_went_after_the_decision_leaves_its_place_empty():
    seen = request([0, 6, 7], [1, 3, 4], [0, 6, 7], 8)
    moves = seen.rebase(Rebase(4, (0, 5, 6, 7), (PageCopy(5, 2, 9),)))
    assert seen.rotary_pages.tolist() == [0, 2, 3] and not len(moves.copies)
    assert moves.pages_down.tolist() == [4, 4]


# ---- scheduler and worker ----


@SYNC_AND_ASYNC
@pytest.mark.parametrize("policy", ["streaming", "h2o", "random"])
def test_one_stream(stock_config, policy, async_scheduling):
    run = RebasingBench(stock_config, policy=policy, chunk_tokens=8, async_scheduling=async_scheduling)
    run.add("a", 90, 100)
    run.run(max_steps=2000)
    assert run.num_rebases >= 8 and len(run.finished["a"]) == 100
    assert run.manager.stats.take_report(P)["rebases"] == run.num_rebases


@SYNC_AND_ASYNC
def test_readers_of_one_prefix_move_copies(stock_config, async_scheduling):
    """Two run past the limit while both hold the prefix: the first to move copies, the last takes what is left."""
    run = RebasingBench(
        stock_config,
        chunk_tokens=8,
        num_blocks=40,
        settings={"budget": 32, "recent": 24},
        async_scheduling=async_scheduling,
    )
    prefix = make_prompt("prefix", 32)
    run.add("a", [*prefix, 1], 60)
    run.run_until(lambda: run.scheduler.requests["a"].num_computed_tokens >= 32)
    for other in "bc":
        run.add(other, [*prefix, ord(other), 2, 3], 60)
    run.run(max_steps=2000)
    assert run.num_copies >= 2 and run.num_rebases >= 3


def test_a_hit_that_is_computed_in_the_same_step_waits(stock_config):
    """What the first request writes in this step cannot be copied before this step's forward pass."""
    prefix = make_prompt("prefix", 24)
    run = RebasingBench(
        stock_config, chunk_tokens=36, num_blocks=60, limit_tokens=28, settings={"budget": 16, "recent": 12}
    )
    run.add("a", [*prefix, 1], 8)
    run.add("b", [*prefix, 2, 3, 4, 5, 6, 7], 8)
    first = run.step()
    assert list(first.output.num_scheduled_tokens) == ["a"]
    second = run.step()
    assert second.output.num_scheduled_tokens["b"] > 0 and second.update.rebases["b"].copies
    run.run()


def test_the_pool_is_asked_for_the_copies(stock_config):
    """No free block is left for a copy: the stream waits or somebody is preempted, and nothing breaks."""
    prefix = make_prompt("prefix", 32)
    for num_blocks in range(14, 26):
        run = RebasingBench(stock_config, chunk_tokens=8, num_blocks=num_blocks, settings={"budget": 32, "recent": 24})
        run.add("a", [*prefix, 1], 40)
        run.run_until(lambda run=run: run.scheduler.requests["a"].num_computed_tokens >= 32)
        run.add("b", [*prefix, 5, 2, 3], 40)
        run.run(max_steps=2000)
        assert run.num_rebases >= 2


def test_nothing_is_left_of_a_request_that_was_preempted_in_the_step_that_would_move_it(stock_config):
    run = RebasingBench(stock_config, chunk_tokens=8)
    run.add("a", 20, 60)
    moved = None
    for _ in range(60):
        step = run.step()
        if step.update.rebases:
            moved = step
            break
    assert moved is not None
    run.preempt("a")
    assert not run.manager._positions._rebases
    run.run(max_steps=1000)
    assert run.num_rebases >= 2


def test_positions_are_counted_in_the_pages_that_there_are(stock_config):
    """The attention backend may choose larger ones than were known when the settings were checked."""
    limit = model_limit(stock_config.model_config)
    settings = {"policy": "streaming", "positions": "rebase", "budget": limit - 15}
    config = configured(stock_config, settings, num_blocks=limit, max_model_len=4 * limit, chunk_tokens=15)
    check_positions(EvictionConfig(**settings), config, page_tokens=1)
    with pytest.raises(EvictionConfigError, match=rf"in pages of {P}, and 15 in flight, are {limit + 3} tokens"):
        make_scheduler(config)
