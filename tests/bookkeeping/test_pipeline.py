"""Pipelines: what the stages have measured comes to the scheduler as one, and it decides as for one rank."""

import json

import pytest

from tests.bookkeeping.test_runtime import SCORES, KeysBench, RuntimeBench, load
from tests.bookkeeping.test_stages import relays
from vllm_evict.engine.host_copy import HostCopy


class StagesBench(KeysBench):
    """A stage in front: the same steps, rows in an order of its own, a quarter of the attention, one layer of keys."""

    def __init__(self, stock, *, first_evicts=True, **options):
        super().__init__(stock, **options)
        to_last, last = relays(2)
        self.first = self.make_runtime(combine=lambda measured: to_last.add(HostCopy(measured)), reports=False)
        self.runtime = self.make_runtime(combine=lambda measured: last.add(HostCopy(measured)))
        self.table.table = self.runtime.table
        self.first_evicts = first_evicts
        if first_evicts:
            self.first.key_readers.append(self.read_layer)
        else:
            del self.first.make_observed  # no layer's builder was bound
            self.runtime.key_readers.append(self.read_layer)
        self.runtime.key_readers.append(self.read_two_layers)

    def _run(self, output, update):
        last, self.runtime = self.runtime, self.first
        self.runtime.begin_step(output)
        request_ids = list(output.num_scheduled_tokens)
        if request_ids and self.first_evicts:
            self.row_order.shuffle(request_ids)
            self.share_of_layers = 0.25
            self.look_at(request_ids)
        assert self.runtime.end_step(None) is None
        self.runtime = last
        self.share_of_layers = 0.75 if self.first_evicts else 1.0
        return super()._run(output, update)

    def check_scores(self, request_id, page_scores, observed):
        if "attention" in page_scores.signals:
            RuntimeBench.check_scores(self, request_id, page_scores, observed)
        if "keys" in page_scores.signals:
            super().check_scores(request_id, page_scores, observed)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("first_evicts", [True, False], ids=["both", "last"])
@pytest.mark.parametrize("policy", ["h2o", "keydiff", "h2o-keydiff"])
def test_stages_report_as_one(stock_config, policy, first_evicts, async_scheduling):
    run = StagesBench(
        stock_config,
        policy=policy,
        first_evicts=first_evicts,
        settings=SCORES,
        async_scheduling=async_scheduling,
        num_blocks=60,
    )
    load(run)
    assert len(run.reports) > 10 and run.manager.stats.num_evicted_pages > 20
    assert len(run.finished) == 6


@pytest.mark.parametrize("policy", ["h2o", "keydiff", "h2o-keydiff"])
def test_two_steps_in_flight_decide_as_one(stock_config, tmp_path, policy):
    """vLLM fills a pipeline of two stages with empty steps while the only request waits for its token."""

    def decisions(steps_in_flight):
        trace = tmp_path / f"{steps_in_flight}.jsonl"
        settings = SCORES | {"trace": str(trace), "prefill_queries": "all"}
        run = StagesBench(stock_config, policy=policy, settings=settings, chunk_tokens=64, num_blocks=60)
        run.steps_in_flight = steps_in_flight
        run.add("a", 36, 24)  # whole pages: the first token of the answer needs another
        run.run()
        num_empty = sum(not step.output.num_scheduled_tokens for step in run.steps)
        assert (num_empty > 10) == (steps_in_flight > 1)
        return [json.loads(line) for line in trace.read_text().splitlines()]

    expected = decisions(1)
    assert len(expected) > 4 and decisions(2) == expected
