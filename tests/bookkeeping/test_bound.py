"""What a request may hold: at start-up, at admission and observed (invariant 9); and what a step costs (14)."""

import sys

import pytest

from tests.bookkeeping.harness import PAGE_TOKENS, runner_output_of
from vllm_evict.config import EvictionConfigError
from vllm_evict.engine.messages import ScoreReport, attach_report

POLICIES = ("streaming", "h2o", "random")
each_policy = pytest.mark.parametrize("policy", POLICIES)
sync_and_async = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
with_and_without_caching = pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])


# ---- the bound: start-up, admission, observed (invariant 9) ----


@each_policy
@sync_and_async
def test_the_least_pool_works_and_one_page_less_is_refused_with_the_number(bench, policy, async_scheduling):
    """Budget 4, in flight 16 tokens (async: 32), one page for a chunk that starts inside a page: 9 (13)."""
    least = 13 if async_scheduling else 9
    run = bench(policy=policy, async_scheduling=async_scheduling, num_blocks=least + 1)
    assert run.max_pages == run.manager.max_admission_blocks_per_request == least
    run.add("a", 50, 14)
    run.run()
    assert not any(step.output.preempted_req_ids for step in run.steps)
    run.add("b", 50, 14)
    run.add("c", 3, 30)
    run.run()
    assert {r: len(tokens) for r, tokens in run.finished.items()} == {"a": 14, "b": 14, "c": 30}
    with pytest.raises(EvictionConfigError) as error:
        bench(policy=policy, async_scheduling=async_scheduling, num_blocks=least)
    message = str(error.value)
    assert f"has {least - 1} usable pages" in message and f"may hold {least} " in message
    assert f"{least + 1} pages" in message and "--kv-eviction-budget" in message and "\n" not in message


@each_policy
@sync_and_async
@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 5, 15, 16, 17, 64])
def test_nobody_ever_holds_more_than_the_bound(bench, policy, async_scheduling, chunk_tokens):
    """Chunks that start anywhere in a page; the harness looks at every step."""
    run = bench(policy=policy, async_scheduling=async_scheduling, chunk_tokens=chunk_tokens, num_blocks=50)
    for i, num_tokens in enumerate((50, 33, 18)):
        run.add(f"r{i}", num_tokens, 10)
    run.run()
    assert run.manager.stats.num_evicted_pages > 0


@each_policy
def test_one_formula_three_times(bench, policy):
    run = bench(policy=policy)
    spec, config = run.manager.kv_cache_spec, run.config
    assert spec.max_memory_usage_bytes(config) == spec.max_pages * spec.page_size_bytes
    assert run.manager.max_admission_blocks_per_request == spec.max_pages


@each_policy
@sync_and_async
def test_a_model_length_far_above_the_pool_is_admitted_and_served(bench, policy, async_scheduling):
    """400 tokens need 100 pages; there are 13. vLLM alone would let the request wait for ever."""
    run = bench(policy=policy, async_scheduling=async_scheduling, num_blocks=14, max_model_len=400)
    run.add("long", 390, 10)
    run.step()
    assert "long" in run.steps[0].output.num_scheduled_tokens
    run.run()
    assert len(run.finished["long"]) == 10


def test_the_last_token_of_max_tokens_and_of_the_model_length(bench):
    """C27: limits go on counting tokens, whatever was evicted."""
    run = bench()
    run.add("max tokens", 30, 13)
    run.add("model length", 30, 1000)
    run.run()
    assert {r: len(tokens) for r, tokens in run.finished.items()} == {"max tokens": 13, "model length": 64 - 30}


@each_policy
def test_a_backlog_drains(bench, policy):
    """C63: 30 requests through a pool for one or two."""
    run = bench(policy=policy, num_blocks=14)
    for i in range(30):
        run.add(f"r{i}", 5 + 7 * i % 50, 3 + i % 9)
    run.run(max_steps=600)
    assert len(run.finished) == 30


# ---- constant work (invariant 14) ----


class CountedList(list):
    """A block list that counts how often somebody walks over it or copies it."""

    walks = 0

    def _walk(self, *args):
        type(self).walks += 1

    def __iter__(self):
        self._walk()
        return super().__iter__()

    def __reversed__(self):
        self._walk()
        return super().__reversed__()

    def __contains__(self, item):
        self._walk()
        return super().__contains__(item)

    def __getitem__(self, key):
        if isinstance(key, slice):
            self._walk()
        return super().__getitem__(key)

    def index(self, *args):
        self._walk()
        return super().index(*args)

    def count(self, item):
        self._walk()
        return super().count(item)

    def copy(self):
        self._walk()
        return super().copy()


def opcodes_of(function):
    """Bytecode operations executed in this package's own code, comprehensions included."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if "/vllm_evict/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count += 1
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(previous)
    return count


@each_policy
@sync_and_async
def test_a_step_costs_the_same_at_60_pages_and_at_400(bench, policy, async_scheduling):
    """Over the steps of four pages, scheduler and worker execute the same number of operations (sorting aside)."""
    run = bench(policy=policy, async_scheduling=async_scheduling, max_model_len=2000, caching=False)
    run.add("a", 20, 1900)
    costs = {}
    for num_pages in (60, 400):
        while len(run.blocks("a")) < num_pages:
            schedule_and_process(run)
        costs[num_pages] = opcodes_of(lambda: [schedule_and_process(run) for _ in range(4 * PAGE_TOKENS)])
    assert costs[60] > 1000
    assert abs(costs[400] - costs[60]) <= 0.02 * costs[60], costs


def schedule_and_process(run):
    """A step without the harness's own looking around, which is not of constant cost."""
    output = run.scheduler.schedule()
    run.table.apply(output, output.kv_eviction)
    sampled = {r: [] if run.scheduler.requests[r].is_prefill_chunk else [7] for r in output.num_scheduled_tokens}
    runner_output = runner_output_of(output, sampled)
    wanted = output.kv_eviction.wanted
    if wanted:
        attach_report(runner_output, ScoreReport({r: run.scores(r, epoch) for r, epoch in wanted.items()}))
    run.pending.append((output, runner_output))
    if len(run.pending) >= run.steps_in_flight:
        run.scheduler.update_from_output(*run.pending.popleft())


@each_policy
@with_and_without_caching
def test_no_step_walks_over_the_logical_pages(bench, policy, caching):
    run = bench(policy=policy, max_model_len=500, caching=caching)
    run.add("a", 20, 400)
    for _ in range(10):
        run.step()
    blocks = run.manager.req_to_blocks["a"] = CountedList(run.blocks("a"))
    CountedList.walks = 0
    for _ in range(100):
        schedule_and_process(run)
    # vLLM itself slices one page off, to hash it, whenever one is full; after the first hole nothing is hashed.
    assert CountedList.walks == 0 and len(blocks) > 30
    assert list(blocks) and CountedList.walks == 1
