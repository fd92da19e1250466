"""Prefix hits, shared pages and what may be offered to others (invariants 3 and 4)."""

import pytest
from vllm.v1.core.block_pool import BlockPool

from tests.bookkeeping.harness import PAGE_TOKENS, Bench
from vllm_evict.pages import pages_for

POLICIES = ("streaming", "h2o", "random")
each_policy = pytest.mark.parametrize("policy", POLICIES)
sync_and_async = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


@pytest.fixture
def bench(stock_config):
    """As everywhere, with room enough that nobody's old pages are overwritten by chance."""
    return lambda **options: Bench(stock_config, **{"num_blocks": 65, "chunk_tokens": 64} | options)


def free_ids(run):
    return {block.block_id for block in run.pool.free_block_queue.get_all_free_blocks()}


def started(run, request_id):
    """vLLM's message about a request that comes in."""
    return next(new for step in run.steps for new in step.output.scheduled_new_reqs if new.req_id == request_id)


def hit_tokens(run, request_id):
    """Tokens of the prefix hit it came in with."""
    return started(run, request_id).num_computed_tokens


def block_ids_at_start(run, request_id):
    return started(run, request_id).block_ids[0]


def whole_text(run, request_id):
    return run.prompts[request_id] + run.finished[request_id]


# ---- what is offered ----


@each_policy
@sync_and_async
def test_pages_computed_before_the_first_hole_are_offered_and_no_later_one(bench, policy, async_scheduling):
    """29 tokens are computed in one go; the first hole is made when 30 are, so seven pages are exact."""
    run = bench(policy=policy, async_scheduling=async_scheduling)
    run.add("a", 29, 31)
    run.run()
    assert run.manager.stats.num_evicted_pages > 8
    assert sum(block.block_hash is not None for block in run.pool.blocks) == 7
    run.add("again", [*whole_text(run, "a"), 1, 2], 1)
    run.run()
    assert hit_tokens(run, "again") == 28


@each_policy
def test_without_a_hole_everything_is_offered(bench, policy):
    run = bench(policy=policy)
    run.add("a", 10, 7)
    run.run()
    run.add("again", [*whole_text(run, "a"), 1, 2], 1)
    run.run()
    assert hit_tokens(run, "again") == 16  # of the 16 computed tokens


@each_policy
def test_a_page_half_full_at_the_first_hole_is_not_offered(bench, policy):
    """30 tokens computed when the hole is made: page 7 gets its last two tokens later, with less to see."""
    run = bench(policy=policy)
    run.add("a", 30, 12)
    run.run()
    run.add("again", whole_text(run, "a")[:40], 1)
    run.run()
    assert hit_tokens(run, "again") == 28


@each_policy
def test_what_follows_a_long_hit_is_not_offered(bench, policy):
    """The hit itself comes with holes, so pages computed after it saw less."""
    run = bench(policy=policy)
    run.add("a", 29, 2)
    run.run()
    hashed = sum(block.block_hash is not None for block in run.pool.blocks)
    run.add("b", [*run.prompts["a"][:28], *range(100, 120)], 5)
    run.run()
    assert run.manager.stats.num_evicted_pages > 0
    assert sum(block.block_hash is not None for block in run.pool.blocks) == hashed == 7


# ---- evicted pages ----


@each_policy
def test_an_evicted_page_stays_hittable_while_it_is_intact(bench, policy):
    """C52."""
    run = bench(policy=policy)
    run.add("a", 40, 10)
    run.run_until(lambda: run.holes("a"))
    evicted = [page for page in run.holes("a") if page < 9]
    assert len(evicted) == 10 - 4
    run.add("b", [*run.prompts["a"][:36], 7], 2)
    run.step()
    assert hit_tokens(run, "b") == 36
    run.run()


@each_policy
def test_an_evicted_page_that_was_overwritten_is_a_miss_from_there_on(bench, policy):
    """C53. The pool is so small that others soon take the pages given back."""
    run = bench(policy=policy, num_blocks=21)
    run.add("a", 40, 24)
    run.run_until(lambda: run.holes("a"))
    first_hole = run.holes("a")[0]
    for i in range(6):
        run.add(f"other {i}", 16, 1)
        run.step()
    run.add("b", [*run.prompts["a"][:36], 7], 1)
    run.run()
    # The harness saw to it that the hit was right; here: it was a short one.
    assert hit_tokens(run, "b") <= first_hole * PAGE_TOKENS


def test_of_the_pages_given_back_the_prefix_stays_hittable_longest(bench):
    """One page after the other is taken from the pool: the hit gets shorter from its end."""
    run = bench(policy="streaming", num_blocks=33)
    run.add("a", 40, 24)
    run.run_until(lambda: run.holes("a"))
    evicted = [block for block in run.pool.free_block_queue.get_all_free_blocks() if block.block_hash is not None]
    assert len(evicted) == 6
    by_page = {
        step_block: page for page, step_block in enumerate(run.steps[0].output.scheduled_new_reqs[0].block_ids[0])
    }
    assert [by_page[block.block_id] for block in evicted] == [6, 5, 4, 3, 2, 1]


@each_policy
def test_unhashed_pages_are_taken_before_a_cached_prefix(bench, policy):
    """C51: a long decode keeps taking the pages it gave back itself, not those of a prefix that might hit."""
    run = bench(policy=policy, num_blocks=18)
    run.add("cached", 24, 1)
    run.run()
    run.add("long", 9, 50)
    run.run()
    run.add("again", [*run.prompts["cached"], 5], 1)
    run.run()
    assert hit_tokens(run, "again") == 24


# ---- a hit longer than the budget ----


def test_a_long_hit_takes_only_the_pages_it_keeps(bench):
    """Nine pages hit, four kept: sink and newest. The other five are neither taken nor pinned."""
    run = bench()
    run.add("a", 37, 1)
    run.run()
    ids = block_ids_at_start(run, "a")
    before = free_ids(run)
    run.add("b", [*run.prompts["a"][:36], 7], 9)
    step = run.step()
    assert hit_tokens(run, "b") == 36
    assert run.drawn("b") == "o.....oooo"
    assert step.update.holes == {"b": (1, 2, 3, 4, 5)}
    taken = before - free_ids(run)
    assert {ids[page] for page in (0, 6, 7, 8)} < taken and len(taken) == 5
    assert [run.pool.blocks[ids[page]].ref_cnt for page in range(9)] == [1, 0, 0, 0, 0, 0, 1, 1, 1]
    run.run()


class NullBlockCounted(BlockPool):
    """As in vLLM 0.32: `touch` counts the null block, too."""

    def touch(self, blocks):
        super().touch([block for block in blocks if not block.is_null])
        self.null_block.ref_cnt += sum(block.is_null for block in blocks)


class NullBlockLeftAlone(BlockPool):
    """As in vLLM 0.33, which neither counts it nor gives it back."""

    def touch(self, blocks):
        super().touch([block for block in blocks if not block.is_null])

    def free_blocks(self, ordered_blocks):
        super().free_blocks([block for block in ordered_blocks if not block.is_null])


@pytest.mark.parametrize("pool_class", [NullBlockCounted, NullBlockLeftAlone])
def test_holes_of_a_hit_are_not_counted_on_the_null_block(bench, pool_class):
    """Whether vLLM's `touch` counts them or not; the harness looks after every step."""
    run = bench()
    run.pool.__class__ = pool_class
    before = run.pool.null_block.ref_cnt
    run.add("a", 37, 1)
    run.run()
    for name in ("b", "c"):
        run.add(name, [*run.prompts["a"][:36], 7], 9)
        run.step()
        assert run.drawn(name) == "o.....oooo"
        assert run.pool.null_block.ref_cnt == before >= 0
    run.run()
    assert run.pool.null_block.ref_cnt == before


@each_policy
def test_a_long_hit_fits_a_pool_of_the_least_size(bench, policy):
    """11 pages in all; ten of them are a hit, and five new ones are needed. vLLM's own count waits for ever."""
    run = bench(policy=policy, num_blocks=12, chunk_tokens=24)
    assert run.max_pages == 11
    run.add("first", 16, 1)
    run.run()
    run.add("a", [*run.prompts["first"], *range(24)], 1)  # a hit of 4 pages, which is no hole yet, and a chunk of 6
    run.run()
    run.add("b", [*run.prompts["a"], *range(100, 120)], 2)
    run.step()
    assert hit_tokens(run, "b") == 40
    run.run()
    assert len(run.finished["b"]) == 2


@each_policy
@pytest.mark.parametrize("num_hit_pages", [3, 4, 5, 9, 14])
def test_admission_counts_of_a_hit_what_is_kept_and_free(bench, policy, num_hit_pages):
    """`get_num_blocks_to_allocate` says exactly what admission then takes from the free list."""
    run = bench(policy=policy)
    run.add("a", num_hit_pages * PAGE_TOKENS + 1, 1)
    run.run()
    request = run.add("b", [*run.prompts["a"][: num_hit_pages * PAGE_TOKENS], 1, 2, 3, 4, 5, 6], 1)
    blocks, num_hit_tokens, _ = run.scheduler.kv_cache_manager.get_computed_blocks(request)
    assert num_hit_tokens == num_hit_pages * PAGE_TOKENS
    free = run.pool.get_num_free_blocks()
    predicted = {
        cap: run.manager.get_num_blocks_to_allocate(
            "b", num_hit_tokens + 6, blocks.blocks[0], num_hit_tokens, num_hit_tokens, num_hit_tokens + 6, cap
        )
        for cap in (False, True)
    }
    run.schedule()
    assert free - run.pool.get_num_free_blocks() == predicted[False] == min(num_hit_pages, 4) + 2
    assert predicted[True] == predicted[False]  # far below the cap
    run.process()
    run.run()


def test_a_hit_on_pages_in_use_costs_nothing_but_new_pages(bench):
    run = bench()
    run.add("a", 13, 9)
    run.step()
    request = run.add("b", [*run.prompts["a"][:12], 1, 2, 3], 1)
    blocks, num_hit_tokens, _ = run.scheduler.kv_cache_manager.get_computed_blocks(request)
    assert run.manager.get_num_blocks_to_allocate("b", 15, blocks.blocks[0], 12, num_hit_tokens, 15) == 1
    run.run()


# ---- shared pages ----


def test_evicting_a_shared_page_drops_one_reference(bench):
    """Two requests share pages 0 to 2. The longer one is trimmed; the shorter one goes on reading all three."""
    run = bench(policy="streaming")
    run.add("a", 12, 1)
    run.run()
    run.add("long", [*run.prompts["a"], *range(200, 230)], 10)
    run.add("short", [*run.prompts["a"], 7], 6)
    run.step()
    ids = block_ids_at_start(run, "short")
    assert block_ids_at_start(run, "long")[:3] == ids[:3]
    assert [run.pool.blocks[i].ref_cnt for i in ids] == [2, 2, 2, 1]
    run.step()
    assert run.drawn("long") == "o.......ooo"
    assert [run.pool.blocks[i].ref_cnt for i in ids] == [2, 1, 1, 1]
    assert not free_ids(run) & set(ids)
    run.run_until(lambda: "short" in run.finished)  # the harness looks at what it reads
    assert set(ids[1:]) <= free_ids(run) and ids[0] not in free_ids(run)
    run.run()


@each_policy
@sync_and_async
def test_the_same_prompt_from_eight_at_once(bench, policy, async_scheduling):
    """C55: pages are offered in the very step that computes them, and evicted in the next."""
    run = bench(policy=policy, async_scheduling=async_scheduling, num_blocks=80)
    prompt = list(range(26))
    for i in range(8):
        run.add(f"r{i}", prompt, 12)
    run.run()
    assert all(len(run.finished[f"r{i}"]) == 12 for i in range(8))
    assert max(hit_tokens(run, f"r{i}") for i in range(8)) == 24


@each_policy
def test_a_resumed_request_hits_its_own_exact_pages_and_obeys_the_budget(bench, policy):
    run = bench(policy=policy)
    run.add("a", 30, 20)
    for _ in range(8):
        run.step()
    assert run.scheduler.reset_prefix_cache(reset_running_requests=True)
    step = run.step()  # preempted and resumed at once, nothing left to hit
    assert step.output.scheduled_cached_reqs.num_computed_tokens == [0]
    run.run_until(lambda: run.holes("a"))
    run.preempt("a")
    step = run.step()
    cached = step.output.scheduled_cached_reqs
    assert cached.resumed_req_ids == {"a"} and cached.num_computed_tokens[0] > 28
    assert len(run.resident("a")) <= 4 + pages_for(step.output.num_scheduled_tokens["a"], PAGE_TOKENS) + 1
    assert set(step.update.holes["a"]) == set(run.holes("a"))
    run.run()
