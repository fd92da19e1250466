"""Arrivals, aborts, preemptions, evictions and shared prefixes in any order; the harness checks after every event."""

import importlib.util
import sys
import zlib
from collections import Counter
from contextlib import suppress
from unittest import mock

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.bookkeeping.harness import PAGE_TOKENS, Bench
from tests.bookkeeping.rebasing import RebasingBench
from vllm_evict.config import EvictionConfigError

TEXT = list(range(64))
PINNED = {"kv_eviction_pin": "9-10", "kv_eviction_budget": 16}
REQUESTS = st.sampled_from("abcdef")


def machine(stock_config, happened, *, async_scheduling, window_tokens=None, rebasing=False):
    class AnyOrder(RuleBasedStateMachine):
        run: Bench

        @initialize(
            policy=st.sampled_from(["streaming", "h2o", "random"]),
            caching=st.booleans(),
            num_blocks=st.integers(16, 30),
            chunk_tokens=st.sampled_from([3, 8, 16]),
            budget=st.sampled_from([(8, 4, 4), (12, 0, 4), (16, 4, 8), (24, 8, 8)]),
            floor=st.sampled_from([None, "below the budget", *([] if rebasing else ["unlimited"])]),
        )
        def start(self, policy, caching, num_blocks, chunk_tokens, budget, floor):
            lengths = dict(zip(("budget", "sink", "recent"), budget, strict=True))
            if floor == "unlimited":
                lengths |= {"floor": lengths["budget"], "budget": "unlimited"}
            elif floor:
                lengths |= {"floor": lengths["budget"], "budget": 2 * lengths["budget"]}
            self.run = (RebasingBench if rebasing else Bench)(
                stock_config,
                policy=policy,
                caching=caching,
                num_blocks=num_blocks + (20 if window_tokens else 0),
                chunk_tokens=chunk_tokens,
                max_seqs=4,
                async_scheduling=async_scheduling,
                window_tokens=window_tokens,
                settings=lengths | {"overrides": "any"},
            )

        def known(self, request_id):
            """In use, or its last step is still in flight (vLLM's front end never gives out an id twice)."""
            in_flight = {r for output, _ in self.run.pending for r in output.num_scheduled_tokens}
            return request_id in self.run.scheduler.requests or request_id in in_flight

        @rule(
            request_id=REQUESTS,
            shared=st.sampled_from([50, 40, 25, 17, 0]),
            own=st.integers(1, 8),
            max_tokens=st.integers(1, 80 if rebasing else 12),
            xargs=st.sampled_from([None, None, {"kv_eviction_budget": 12}, {"kv_eviction": "random"}, PINNED]),
        )
        def arrive(self, request_id, shared, own, max_tokens, xargs):
            if not self.known(request_id):
                prompt = [*TEXT[:shared], *(100 + ord(request_id) + i for i in range(own))]
                with suppress(EvictionConfigError):  # the front end would refuse it
                    self.run.add(request_id, prompt, max_tokens, xargs)

        @rule(num_steps=st.integers(1, 4))
        def go_on(self, num_steps):
            for _ in range(num_steps):
                self.run.step()

        @precondition(lambda self: self.run.pending)
        @rule()
        def catch_up(self):
            self.run.process()

        @rule(request_id=REQUESTS)
        def abort(self, request_id):
            self.run.abort(request_id)

        @precondition(lambda self: self.run.scheduler.running)
        @rule(data=st.data())
        def preempt(self, data):
            request = data.draw(st.sampled_from(self.run.scheduler.running))
            self.run.preempt(request.request_id)

        @rule()
        def forget_all_prefixes(self):
            self.run.scheduler.reset_prefix_cache(reset_running_requests=True)
            self.run.check()

        def teardown(self):
            if hasattr(self, "run"):
                self.run.run(max_steps=2000)
                assert self.run.pool.get_num_free_blocks() == len(self.run.pool.blocks) - 1
                happened["saved"] += self.run.manager.stats.take_report(PAGE_TOKENS).get("preemptions_saved", 0)
                happened["evicted"] += self.run.manager.stats.num_evicted_pages
                for step in self.run.steps:
                    scheduled = repr(step.output.num_scheduled_tokens).encode()
                    happened["all that was scheduled"] = zlib.crc32(scheduled, happened["all that was scheduled"])
                    happened["resumed"] += len(step.output.scheduled_cached_reqs.resumed_req_ids)
                if rebasing:
                    happened["rebased"] += self.run.num_rebases

    return AnyOrder


KINDS = pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"async_scheduling": True},
        {"async_scheduling": False, "window_tokens": 9},
        {"async_scheduling": False, "rebasing": True},
        {"async_scheduling": True, "rebasing": True},
    ],
    ids=["sync", "async", "windows", "rebase", "rebase-async"],
)


def examples(stock_config, num_examples, options):
    """What happened in the same examples each time, whatever else this process has loaded.

    Hypothesis would mix in numbers that it finds in the source of loaded modules, which are others after other tests.
    """
    happened = Counter()
    with mock.patch.object(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None):
        run_state_machine_as_test(
            seed(0)(machine(stock_config, happened, **options)),
            settings=settings(
                phases=(Phase.generate,),
                max_examples=num_examples,
                stateful_step_count=40,
                deadline=None,
                database=None,
            ),
        )
    return happened


def check_any_order(stock_config, num_examples, options):
    happened = examples(stock_config, num_examples, options)
    assert happened["evicted"] > 50 and happened["resumed"] > 5
    assert happened["saved"] > 0 or "window_tokens" in options  # whose pool is roomy
    if "rebasing" in options:
        assert happened["rebased"] > 50


def test_examples_are_the_same_whatever_is_loaded(stock_config, tmp_path, monkeypatch):
    """A module of ours, with numbers that would do, is loaded between the two."""
    before = examples(stock_config, 5, {"async_scheduling": False})
    file = tmp_path / "numbers_of_ours.py"
    file.write_text(f"NUMBERS = {list(range(2, 30))}\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, file.stem, module)
    assert examples(stock_config, 5, {"async_scheduling": False}) == before


@KINDS
def test_any_order(stock_config, options):
    check_any_order(stock_config, 100, options)  # 4,000 events


@pytest.mark.slow
@KINDS
def test_any_order_for_long(stock_config, options):
    check_any_order(stock_config, 500, options)
