"""Which groups of layers there are (windows beside full attention, none, two), and which block is the null block."""

import pytest
from vllm.v1.core.block_pool import BlockPool

from tests.bookkeeping.harness import PAGE_TOKENS, STOCK_SPEC, configured, make_scheduler, make_spec, window_spec

each_policy = pytest.mark.parametrize("policy", ["streaming", "h2o", "random"])
sync_and_async = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
SETTINGS = {"policy": "streaming", "budget": 16, "sink": 4, "recent": 8}


# ---- no group, two groups ----


def test_workers_without_the_plugin_are_noticed(stock_config):
    """C47: the scheduler evicts, but the workers reported plain full attention."""
    with pytest.raises(ValueError, match="no attention layer reported an evicting KV cache") as error:
        make_scheduler(configured(stock_config, SETTINGS), [STOCK_SPEC])
    assert "workers" in str(error.value) and "drop --kv-eviction" in str(error.value)


def test_a_model_of_windows_only_is_not_blamed_on_the_workers(stock_config):
    """C26: refused naming the cache kind; nothing is missing in the workers' environment."""
    with pytest.raises(ValueError, match="window") as error:
        make_scheduler(configured(stock_config, SETTINGS), [window_spec(8)])
    assert "did not load" not in str(error.value) and "drop --kv-eviction" in str(error.value).lower()


def test_two_evicting_groups_are_refused(stock_config):
    config = configured(stock_config, SETTINGS)
    with pytest.raises(ValueError, match="got 2 groups") as error:
        make_scheduler(config, [make_spec(config), make_spec(config)])
    assert "\n" not in str(error.value)


# ---- windows beside full attention ----


@each_policy
@sync_and_async
@pytest.mark.parametrize("window_tokens", [5, 12, 30])
def test_windows_beside_evicting_layers(bench, policy, async_scheduling, window_tokens):
    """Holes are made in one group only; the harness looks at what both groups read."""
    run = bench(
        policy=policy, async_scheduling=async_scheduling, window_tokens=window_tokens, num_blocks=60, caching=False
    )
    for i in range(4):
        run.add(f"r{i}", 10 + 9 * i, 20)
    run.run()
    assert run.manager.stats.num_evicted_pages > 10
    assert len(run.finished) == 4


@each_policy
@sync_and_async
@pytest.mark.parametrize("window_tokens", [5, 12, 30])
def test_windows_beside_evicting_layers_share_only_what_saw_everything(bench, policy, async_scheduling, window_tokens):
    """Invariant 3 holds for all groups: what a window layer computes after a hole rests on layers that saw less.

    Such a page of the window group, offered beside pages of the full group that somebody else computed with everything
    visible (the trimmed ones are overwritten first), makes a hit that nobody ever computed.
    """
    run = bench(policy=policy, async_scheduling=async_scheduling, window_tokens=window_tokens, num_blocks=60)
    run.add("a", 30, 20)
    run.add("b", 12, 12)
    run.run()
    run.add("again", [*run.prompts["a"], *run.finished["a"]], 5)
    run.run()
    assert run.manager.stats.num_evicted_pages > 10


@each_policy
def test_a_long_hit_beside_windows(bench, policy):
    run = bench(policy=policy, window_tokens=8, num_blocks=60, chunk_tokens=64)
    run.add("a", 36, 1)
    run.run()
    run.add("b", [*run.prompts["a"], 1, 2, 3], 5)
    step = run.step()
    assert step.output.scheduled_new_reqs[0].num_computed_tokens == 36
    assert len(step.update.holes["b"]) == 9 - 4
    run.run()


def test_windows_as_stock_beside_nothing_that_evicts(bench):
    """keep-all: the window group gives its pages back as ever."""
    run = bench(policy="keep-all", window_tokens=8, num_blocks=60)
    run.add("a", 30, 30)
    run.run_until(lambda: len(run.finished) or len(run.blocks("a")) == 14)
    window = run.managers[0].req_to_blocks["a"]
    assert sum(block is not run.pool.null_block for block in window) <= 3
    assert run.drawn("a") == "o" * 14
    run.run()


# ---- the null block (C54) ----


@pytest.fixture
def null_block_is_the_last(monkeypatch):
    """Then block 0 is a page like any other, and whoever compares with the number 0 is found out."""
    original = BlockPool.__init__

    def init(pool, *args, **kwargs):
        original(pool, *args, **kwargs)
        zero, last = pool.null_block, pool.free_block_queue.get_all_free_blocks()[-1]
        pool.free_block_queue.remove(last)
        last.is_null, pool.null_block = True, last
        zero.is_null = False
        pool.free_block_queue.prepend_n([zero])

    monkeypatch.setattr(BlockPool, "__init__", init)


@each_policy
@sync_and_async
def test_the_null_block_is_known_by_itself_and_not_by_its_number(
    null_block_is_the_last, bench, policy, async_scheduling
):
    run = bench(policy=policy, async_scheduling=async_scheduling, num_blocks=20)
    assert run.pool.null_block.block_id == 19
    run.add("a", 30, 20)
    run.step()
    assert run.blocks("a")[0].block_id == 0 and run.table["a"].block_ids[0] == 0
    run.add("b", [*run.prompts["a"][:25], 3], 20)
    run.run()
    assert run.manager.stats.num_evicted_pages > 10


@each_policy
def test_a_long_hit_names_the_null_block_where_pages_are_missing(null_block_is_the_last, bench, policy):
    run = bench(policy=policy, num_blocks=20, chunk_tokens=64)
    run.add("a", 9 * PAGE_TOKENS, 1)
    run.run()
    run.add("b", [*run.prompts["a"], 3], 2)
    (new,) = run.step().output.scheduled_new_reqs
    assert [block_id == 19 for block_id in new.block_ids[0]] == [cell == "." for cell in run.drawn("b")]
    assert 0 in new.block_ids[0] and 19 not in run.table["b"].block_ids
    run.run()
