"""The block manager inside vLLM's real scheduler: pages of 4 tokens, a pool of a few pages, no model.

`Bench` checks after every step, whatever the test is about: O-POOL, the exact prefix cache, that nobody reads foreign
or overwritten text, the bound, and that the worker's table is the manager's (see harness.py). The tests bring about
what those checks are to see, and count by hand.
"""

import numpy as np
import pytest

from tests.bookkeeping.harness import (
    configured,
    make_prompt,
    make_request,
    make_scheduler,
    runner_output_of,
    score_of,
)
from tests.oracle.trace import read_trace
from vllm_evict.engine.messages import PageScores

POLICIES = ("streaming", "h2o", "random")
each_policy = pytest.mark.parametrize("policy", POLICIES)
sync_and_async = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
with_and_without_caching = pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])


def drawings(bench, request_id):
    """The request's block list after every step, until it ends."""
    while request_id in bench.scheduler.requests:
        bench.step()
        if bench.blocks(request_id):
            yield bench.drawn(request_id)


def free_ids(bench):
    return {block.block_id for block in bench.pool.free_block_queue.get_all_free_blocks()}


# ---- everything at once ----


@each_policy
@sync_and_async
@with_and_without_caching
@pytest.mark.parametrize("num_blocks", [14, 40])
def test_mixed_load(bench, policy, async_scheduling, caching, num_blocks):
    """Long and short, prompts in chunks, shared prefixes, and in the small pool preemption."""
    run = bench(policy=policy, async_scheduling=async_scheduling, caching=caching, num_blocks=num_blocks)
    shared = list(range(18))
    lengths = {"long": (40, 20), "short": (3, 5), "late": (30, 12)} | {f"growing {i}": (5, 25) for i in range(4)}
    run.add("long", *lengths["long"])
    run.add("short", *lengths["short"])
    run.add("shared 1", [*shared, 1, 2, 3], 20)
    for _ in range(4):
        run.step()
    for i in range(4):
        run.add(f"growing {i}", *lengths[f"growing {i}"])
    for i in range(2, 5):
        run.add(f"shared {i}", [*shared, 1, 2, i], 20)
    run.step()
    run.add("late", *lengths["late"])
    run.run()
    lengths |= {f"shared {i}": (21, 20) for i in range(1, 5)}
    assert {r: len(tokens) for r, tokens in run.finished.items()} == {r: num for r, (_, num) in lengths.items()}
    for request_id, tokens in run.finished.items():
        prompt = run.prompts[request_id]
        assert tokens == [run.token_at(request_id, len(prompt) + i) for i in range(len(tokens))]
    assert run.manager.stats.num_evicted_pages > 20
    assert any(step.output.preempted_req_ids for step in run.steps) == (num_blocks == 14)
    assert len(free_ids(run)) == num_blocks - 1
    # The bound is not a loose one.
    assert run.max_pages - 1 - (run.steps_in_flight - 1) * 4 <= run.peak_pages <= run.max_pages


# ---- one request, drawn ----


def test_streaming_drawn(bench):
    """A prompt of 30 tokens in chunks of 16, budget 4 pages: sink, then the newest."""
    run = bench()
    run.add("a", 30, 12)
    assert list(drawings(run, "a"))[:-1] == [
        "oooo",  # 16 tokens
        "oooooooo",  # 30: the whole chunk attends to all it may see (invariant 8)
        "o....ooo",  # 31: then it shrinks
        "o....ooo",  # 32
        "o....oooo",  # 33: at the budget when the step begins, and the page that the step opens
        "o.....ooo",
        "o.....ooo",
        "o.....ooo",
        "o.....oooo",  # 37
        "o......ooo",
        "o......ooo",
    ]


@pytest.mark.parametrize("policy", ["h2o"])
def test_h2o_drawn(bench, policy):
    """Scores by hand: of the unprotected pages 1 to 5 the lightest go; later page 6, when it is open and lighter."""
    run = bench(policy=policy)
    weight = {1: 0.9, 2: 0.1, 3: 0.3, 4: 0.2, 5: 0.05, 6: 0.95, 7: 0.5}

    def scores(request_id, epoch):
        pages = run.table[request_id].pages
        return PageScores(epoch, pages, {"attention": np.array([weight.get(int(page), 0.0) for page in pages])})

    run.scores = scores
    run.add("a", 30, 14)
    assert list(drawings(run, "a"))[:-1] == [
        "oooo",
        "oooooooo",
        "oo....oo",  # 31: pages 2, 3, 4, 5 were lighter than page 1; 6 and 7 are recent
        "oo....oo",
        "oo....ooo",  # 33
        "o.....ooo",  # page 6 has left the recent window and is heavier than page 1
        "o.....ooo",
        "o.....ooo",
        "o.....oooo",  # 37
        "o.....o.oo",  # page 7 is lighter than page 6
        "o.....o.oo",
        "o.....o.oo",
        "o.....o.ooo",  # 41
    ]


@each_policy
def test_a_prompt_within_the_budget_and_one_page_over(bench, policy):
    run = bench(policy=policy)
    run.add("a", 10, 6)
    run.run()
    assert run.manager.stats.num_evicted_pages == 0
    run.add("b", 10, 8)
    run.run()  # 17 tokens computed: the last step opened a fifth page
    assert run.manager.stats.num_evicted_pages == 0
    run.add("c", 10, 9)
    run.run()  # and here another step began with it
    assert run.manager.stats.num_evicted_pages == 1


@pytest.mark.parametrize("chunk_tokens", [4, 8, 64])
@each_policy
def test_chunks_of_one_page_two_pages_and_the_whole_prompt(bench, policy, chunk_tokens):
    run = bench(policy=policy, chunk_tokens=chunk_tokens, num_blocks=33)
    run.add("a", 57, 7)
    run.run()
    # 63 tokens computed = 16 pages; when the last step began, 4 of the 16 it had were left.
    assert run.manager.stats.num_evicted_pages == 16 - 4
    assert run.peak_pages == {4: 5, 8: 6, 64: 15}[chunk_tokens]


def test_nothing_piles_up_where_nobody_takes_reports(bench):
    run = bench(policy="h2o", num_blocks=40, max_model_len=400)
    run.scheduler.page_evictor.stats.keeps_shares = False  # as with --disable-log-stats
    run.add("a", 20, 300)
    run.run()
    assert run.manager.stats.num_evictions > 50
    assert run.manager.stats.take_report(4)["evicted_mass_shares"] == []


def test_stats_and_trace_tell_what_happened(bench, tmp_path):
    run = bench(policy="h2o", settings={"trace": str(tmp_path / "trace.jsonl")})
    run.add("a", 30, 20)
    run.add("b", 25, 20)
    run.run()
    holes = {"a": [], "b": []}
    for step in run.steps:
        for request_id, pages in step.update.holes.items():
            holes[request_id].append(list(pages))
    trace = read_trace(tmp_path / "trace.jsonl")
    for request_id in ("a", "b"):
        assert [list(line.pages) for line in trace[request_id]] == holes[request_id]
        for line in trace[request_id]:
            assert line.epoch == 0
            assert set(line.pages) <= set(line.resident)
            for page, score in line.score_of().items():
                assert score == score_of(request_id, page)
    assert run.manager.stats.num_evictions == sum(map(len, holes.values()))
    assert run.manager.stats.num_evicted_pages == sum(len(pages) for made in holes.values() for pages in made)


# ---- windows as long as the model (C59) and the off switch ----


def held_by_vllm(stock_config, requests, **options):
    """vLLM's own scheduler on the same load: pages held by each request at each step."""
    scheduler = make_scheduler(configured(stock_config, None, **options))
    for request_id, (num_tokens, max_tokens) in requests.items():
        scheduler.add_request(make_request(request_id, make_prompt(request_id, num_tokens), max_tokens))
    held = []
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        held.append({r: len(scheduler.kv_cache_manager.get_block_ids(r)[0]) for r in scheduler.requests})
        sampled = {r: [] if scheduler.requests[r].is_prefill_chunk else [7] for r in output.num_scheduled_tokens}
        scheduler.update_from_output(output, runner_output_of(output, sampled))
    return held


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "keep-all"},
        *({"policy": p, "settings": {"budget": b, "recent": None}} for p in POLICIES for b in (63, 64, 65, 640)),
        {"policy": "streaming", "settings": {"budget": 68, "recent": 63}},
        {"policy": "h2o", "settings": {"budget": 644, "recent": 640}},
    ],
    ids=str,
)
def test_a_budget_as_long_as_the_model_holds_what_vllm_holds(bench, stock_config, options):
    requests = {"a": (30, 34), "b": (5, 20), "c": (63, 1)}
    run = bench(num_blocks=50, **options)
    for request_id, (prompt, max_tokens) in requests.items():
        run.add(request_id, prompt, max_tokens)
    held = []
    while run.scheduler.has_unfinished_requests():
        run.schedule()
        held.append({r: run.manager.resident_pages(r) for r in run.scheduler.requests})
        run.process()
    assert held == held_by_vllm(stock_config, requests, num_blocks=50)
    assert run.manager.stats.num_evicted_pages == 0
    assert run.max_pages == 16


# ---- reset: preemption, abort, finish (invariant 10) ----


@each_policy
@sync_and_async
@with_and_without_caching
@pytest.mark.parametrize("at_step", [1, 2, 3, 5, 9])
def test_preempted_at_any_step_it_comes_back_within_the_budget(bench, policy, async_scheduling, caching, at_step):
    run = bench(policy=policy, async_scheduling=async_scheduling, caching=caching, num_blocks=40)
    run.add("a", 40, 15)
    run.add("b", 20, 15)
    for _ in range(at_step):
        run.step()
    request = run.preempt("a")
    assert run.manager.resident_pages("a") == 0
    run.step()
    run.run()
    assert request.num_preemptions == 1
    assert run.finished["a"] == [run.token_at("a", 40 + i) for i in range(15)]


@each_policy
def test_trimmed_and_preempted_in_one_step(bench, policy, monkeypatch):
    """The holes made as the step began are nobody's when the same step takes all pages away."""
    run = bench(policy=policy, num_blocks=40)
    run.add("a", 5, 20)
    run.add("b", 30, 20)
    run.run_until(lambda: len(run.resident("b")) > 4)
    manager, num_evicted = run.scheduler.kv_cache_manager, run.manager.stats.num_evicted_pages
    allocate_slots = manager.allocate_slots

    def fail_once(*args, **kwargs):
        monkeypatch.setattr(manager, "allocate_slots", allocate_slots)

    monkeypatch.setattr(manager, "allocate_slots", fail_once)
    step = run.schedule()
    assert run.manager.stats.num_evicted_pages > num_evicted  # "b" was trimmed first
    assert step.output.preempted_req_ids == {"b"} and "b" not in step.update.holes
    run.process()
    run.run()
    assert len(run.finished["b"]) == 20


@each_policy
@sync_and_async
@pytest.mark.parametrize("at_step", [0, 1, 2, 3, 6, 12])
def test_aborted_at_any_step_nothing_is_left(bench, policy, async_scheduling, at_step):
    run = bench(policy=policy, async_scheduling=async_scheduling)
    run.add("a", 30, 20)
    run.add("b", 12, 20)
    for _ in range(at_step):
        run.step()
    run.abort("a")
    assert run.manager.resident_pages("a") == 0
    run.step()
    with pytest.raises(KeyError):
        run.table["a"]
    run.run()
    assert len(free_ids(run)) == 16


@each_policy
def test_freeing_twice_is_freeing_once(bench, policy):
    run = bench(policy=policy)
    run.add("a", 30, 20)
    run.run_until(lambda: run.holes("a"))
    held = len(run.resident("a"))
    free = run.pool.get_num_free_blocks()
    run.manager.free("a")
    assert run.pool.get_num_free_blocks() == free + held
    for request_id in ("a", "a", "nobody"):
        run.manager.free(request_id)
        assert run.manager.pop_blocks_for_free(request_id) == []
    assert run.pool.get_num_free_blocks() == free + held


@each_policy
@sync_and_async
def test_an_id_used_again_starts_anew(bench, policy, async_scheduling):
    run = bench(policy=policy, async_scheduling=async_scheduling)
    run.add("a", 30, 20)
    run.run_until(lambda: run.holes("a"))
    run.abort("a")
    while run.pending:  # ids are unique among requests in flight; vLLM's front end sees to that
        run.process()
    run.add("a", list(range(6)), 3)
    run.step()
    assert run.drawn("a") == "oo" and run.table["a"].pages.tolist() == [0, 1]
    run.run()
    assert len(run.finished["a"]) == 3
