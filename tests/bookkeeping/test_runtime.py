"""`EvictionRuntime`: what a step's attention reads and observes, and whose scores come back (invariants 6 and 7).

The scheduler is real; the attention is a number made up for every request and page, so that a score that lands on
another page or with another request is seen.
"""

import copy
import random
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

from tests.bookkeeping.harness import PAGE_TOKENS, Bench, score_of
from vllm_evict.engine.decode_mass import DecodeMass
from vllm_evict.engine.messages import report_of
from vllm_evict.engine.rows import RowBuffers
from vllm_evict.engine.runtime import EvictionRuntime, ScoredOutput, StepScores

NUM_LAYERS = 3


@dataclass
class Observed:
    token: np.ndarray
    row: np.ndarray
    visible_tokens: np.ndarray


class RuntimeBench(Bench):
    """The worker's runtime in place of the bare table; rows in an order of the runner's own."""

    def __init__(self, stock, *, row_seed=0, **options):
        super().__init__(stock, **options)
        self.runtime = self.make_runtime()
        self.share_of_layers = 1.0
        self.table = Applied(self.runtime.table)
        self.row_order = random.Random(row_seed)
        self.observed: dict[str, list[int]] = {}
        self.reports: list[dict[str, list[float]]] = []
        self.unread: list[tuple] = []

    def make_runtime(self, **options):
        buffers = RowBuffers(
            self.config.scheduler_config.max_num_seqs, len(self.pool.blocks), PAGE_TOKENS, torch.device("cpu")
        )
        asynchronous = self.config.scheduler_config.async_scheduling
        runtime = EvictionRuntime(
            self.settings, 0, PAGE_TOKENS, NUM_LAYERS, buffers=buffers, asynchronous=asynchronous, **options
        )
        runtime.make_observed = Observed
        return runtime

    def _run(self, output, update):
        self.runtime.begin_step(output)
        assert self.runtime.in_step
        runner_output = super()._run(output, type(update)(update.holes))  # its report is the runtime's business
        for request_id in {
            new.req_id for new in output.scheduled_new_reqs
        } | output.scheduled_cached_reqs.resumed_req_ids:
            self.observed.pop(request_id, None)  # preempted: seen by nobody
        request_ids = list(output.num_scheduled_tokens)
        self.row_order.shuffle(request_ids)
        if request_ids:
            self.look_at(request_ids)
        before = runner_output
        runner_output = self.runtime.end_step(runner_output)
        assert not self.runtime.in_step and report_of(before) is None
        # How things stand now is what the report must say, however late it is read.
        resident = {request_id: self.resident(request_id) for request_id in update.wanted}
        expected = update.wanted, resident, copy.deepcopy(self.observed)
        if isinstance(runner_output, AsyncModelRunnerOutput):
            assert self.config.scheduler_config.async_scheduling
            self.unread.append(expected)
        elif self.config.scheduler_config.async_scheduling:
            assert not update.wanted
        else:
            self.check_report(runner_output, *expected)
        return runner_output

    def read(self, runner_output):
        expected = self.unread.pop(0)
        output = runner_output.get_output()
        self.check_report(output, *expected)
        return output

    def check_report(self, runner_output, wanted, resident, observed):
        report = report_of(runner_output)
        assert (set(report.scores) if report else set()) == set(wanted)
        if report:
            self.reports.append(
                {r: {s: v.tolist() for s, v in scores.signals.items()} for r, scores in report.scores.items()}
            )
            for request_id, page_scores in report.scores.items():
                assert page_scores.epoch == wanted[request_id]
                assert page_scores.pages.tolist() == resident[request_id]
                self.check_scores(request_id, page_scores, observed)

    def look_at(self, request_ids):
        rows = self.runtime.batch_rows(request_ids)
        assert self.runtime.batch_rows(request_ids) is rows  # built once a step
        table, lens = rows.block_table.numpy(), rows.physical_lens.numpy()
        first_token = {}
        total = 0
        for row, request_id in enumerate(request_ids):
            blocks = [self.blocks(request_id)[page].block_id for page in self.resident(request_id)]
            assert table[row].tolist() == blocks + [0] * (table.shape[1] - len(blocks))
            num_tokens = self.scheduler.requests[request_id].num_computed_tokens
            assert lens[row] == num_tokens - PAGE_TOKENS * len(self.holes(request_id))
            first_token[total] = (row, request_id)
            total += self.runtime.table[request_id].num_scheduled_tokens
        self.observe(rows, first_token, self.runtime.mass_request)

    def observe(self, rows, first_token, request):
        if request is None:
            return
        assert request.layer_weight == 1 / NUM_LAYERS
        assert request.block_table[: len(rows.block_table), : rows.max_pages].equal(
            rows.block_table[:, : rows.max_pages]
        )
        observed = request.observed
        for i in range(len(observed.token)):
            if observed.visible_tokens[i] == 0:  # listed, but not asked for
                continue
            start = max(token for token in first_token if token <= observed.token[i])
            row, request_id = first_token[start]
            assert observed.row[i] == row
            position = self.runtime.table[request_id].num_computed_tokens + int(observed.token[i]) - start
            resident = self.resident(request_id)
            visible = sum(page * PAGE_TOKENS + slot <= position for page in resident for slot in range(PAGE_TOKENS))
            assert observed.visible_tokens[i] == visible
            self.observed.setdefault(request_id, []).append(position)
            for column, page in enumerate(resident):
                if page * PAGE_TOKENS <= position:
                    request.page_mass[i, column] = self.share_of_layers * score_of(request_id, page)

    def check_scores(self, request_id, page_scores, observed):
        """With a mean over observed queries each page gets back its own number, or nothing if nobody looked."""
        for page, score in zip(page_scores.pages.tolist(), page_scores.signals["attention"].tolist(), strict=True):
            looked = any(position >= page * PAGE_TOKENS for position in observed.get(request_id, ()))
            if looked:
                assert score == pytest.approx(score_of(request_id, page), rel=1e-6)
            else:
                assert np.isnan(score)


class ReplayBench(RuntimeBench):
    """Steps in which everybody decodes replay one CUDA graph, which knows only the tensors of its capture."""

    def __init__(self, stock, **options):
        super().__init__(stock, **options)
        table = self.runtime.buffers.block_table
        self.runtime.decode_mass = DecodeMass(*table.shape, table.device)
        self.captured = self.runtime.nobodys_mass(len(table))
        self.num_replays = self.num_skipped = 0

    def observe(self, rows, first_token, request):
        if len(first_token) == sum(self.runtime.table[r].num_scheduled_tokens for _, r in first_token.values()):
            self.num_replays += 1
            assert bool(self.captured.enabled) == (request is not None)
            self.num_skipped += request is None
            request = self.captured if self.captured.enabled else None
        super().observe(rows, first_token, request)


class Applied:
    """The runtime applies its table itself, once."""

    def __init__(self, table):
        self.table = table

    def apply(self, output, update):
        pass

    def __getitem__(self, request_id):
        return self.table[request_id]

    def __len__(self):
        return len(self.table)


def load(run):
    for i in range(5):
        run.add(f"r{i}", 9 + 8 * i, 16)
    run.step()
    run.add("hit", [*run.prompts["r4"][:12], 1, 2, 3, 4, 5, 6, 7, 8, 9], 16)
    run.run_until(lambda: run.holes("r2"))
    run.preempt("r2")
    run.run()
    assert any("r2" in step.output.scheduled_cached_reqs.resumed_req_ids for step in run.steps)
    return run


SCORES = {"score": "mean", "budget": 16, "sink": 4, "recent": 8}


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("score_every", [1, 3])
@pytest.mark.parametrize("prefill_queries", [2, "all"])
@pytest.mark.parametrize("num_blocks", [22, 60])
def test_every_score_comes_back_to_its_page_and_request(
    stock_config, async_scheduling, score_every, prefill_queries, num_blocks
):
    settings = SCORES | {"score_every": score_every, "prefill_queries": prefill_queries}
    run = load(
        RuntimeBench(
            stock_config,
            policy="h2o",
            settings=settings,
            async_scheduling=async_scheduling,
            num_blocks=num_blocks,
        )
    )
    assert len(run.reports) > 10 and run.manager.stats.num_evicted_pages > 20
    assert len(run.finished) == 6


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("num_blocks", "score_every"), [(22, 1), (60, 3)])
def test_a_replayed_graph_observes_what_the_step_wants(stock_config, async_scheduling, num_blocks, score_every):
    run = load(
        ReplayBench(
            stock_config,
            policy="h2o",
            settings=SCORES | {"score_every": score_every},
            async_scheduling=async_scheduling,
            num_blocks=num_blocks,
        )
    )
    assert len(run.reports) > 10 and len(run.finished) == 6
    assert run.num_replays > 10 and (run.num_skipped > 0) == (score_every > 1)


def test_a_batch_of_nobody_observes_nothing(stock_config):
    """Idle data-parallel ranks replay graphs, too, after steps that did observe."""
    run = ReplayBench(stock_config, policy="h2o", settings=SCORES | {"score_every": 1})
    run.add("a", 30, 12)
    run.run_until(lambda: run.num_replays > 3)
    assert bool(run.captured.enabled)
    assert run.runtime.nobodys_mass(3).enabled is run.captured.enabled
    assert not run.captured.enabled


@pytest.mark.parametrize("prefill_queries", [2, "all"])
def test_the_order_of_rows_changes_no_report(stock_config, prefill_queries):
    settings = SCORES | {"score": "distant-mean", "prefill_queries": prefill_queries}
    runs = []
    for row_seed in (1, 2):
        run = RuntimeBench(stock_config, policy="h2o", settings=settings, num_blocks=40, row_seed=row_seed)
        run.check_scores = lambda *args: None
        runs.append(load(run))
    np.testing.assert_equal(runs[0].reports, runs[1].reports)
    assert [step.update for step in runs[0].steps] == [step.update for step in runs[1].steps]


def test_which_queries_are_observed_by_hand(stock_config):
    """Prompt 30 in chunks of 16, of each its last 3; then every fourth token (positions 31, 35, ...)."""
    settings = SCORES | {"score_every": 4, "prefill_queries": 3}
    run = RuntimeBench(stock_config, policy="h2o", settings=settings)
    run.add("a", 30, 12)
    run.run()
    assert run.observed["a"] == [13, 14, 15, 27, 28, 29, 31, 35, 39]


def test_none_of_the_prompt_is_observed_if_so_wished(stock_config):
    settings = SCORES | {"score_every": 4, "prefill_queries": 0}
    run = RuntimeBench(stock_config, policy="h2o", settings=settings)
    run.add("a", 30, 12)
    run.run()
    assert run.observed["a"] == [31, 35, 39]


def test_all_of_the_prompt_and_every_token(stock_config):
    settings = SCORES | {"score_every": 1, "prefill_queries": "all"}
    run = RuntimeBench(stock_config, policy="h2o", settings=settings)
    run.add("a", 30, 12)
    run.run()
    assert run.observed["a"] == list(range(41))


@pytest.mark.parametrize("policy", ["streaming", "random", "keep-all"])
def test_who_needs_no_scores_observes_nothing(stock_config, policy):
    run = RuntimeBench(stock_config, policy=policy, num_blocks=60)
    run.add("a", 30, 12)
    run.run()
    assert run.observed == {} and run.reports == []


def test_vllm_s_shared_empty_output_is_not_written_to(stock_config):
    run = RuntimeBench(stock_config, policy="h2o", settings=SCORES, num_blocks=40)
    run.add("a", 30, 12)
    run.step()
    output = run.scheduler.schedule()
    run.runtime.begin_step(output)
    attached = run.runtime.end_step(EMPTY_MODEL_RUNNER_OUTPUT)
    assert report_of(attached).scores.keys() == {"a"}
    assert report_of(EMPTY_MODEL_RUNNER_OUTPUT) is None and isinstance(attached, ModelRunnerOutput)


# ---- what vLLM 0.33 asks of an output that is not there yet ----


class AsyncModelRunnerOutput33(AsyncModelRunnerOutput):
    """As in vLLM 0.33, where it has a second abstract method."""

    @abstractmethod
    def get_kv_connector_output(self): ...


class FailedOutput(AsyncModelRunnerOutput33):
    """The step is lost; what its connector has moved is not."""

    def __init__(self, kv_connector_output):
        self.kv_connector_output = kv_connector_output

    def get_output(self):
        raise RuntimeError("a rank timed out")

    def get_kv_connector_output(self):
        return self.kv_connector_output


class ScoredOutput33(ScoredOutput, AsyncModelRunnerOutput33):
    """Ours, where it is asked for both."""


@pytest.mark.parametrize("moved", [KVConnectorOutput(finished_sending={"a"}), None], ids=["moved", "nothing moved"])
def test_what_the_connector_moved_outlives_a_failed_step(moved):
    output = ScoredOutput33(FailedOutput(moved), StepScores([]), runtime=None)
    with pytest.raises(RuntimeError, match="timed out"):
        output.get_output()
    assert output.get_kv_connector_output() is moved


@pytest.mark.parametrize("moved", [KVConnectorOutput(finished_sending={"a"}), None], ids=["moved", "nothing moved"])
def test_what_the_connector_moved_is_read_off_an_output_that_is_there(moved):
    plain = ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=moved)
    assert ScoredOutput33(plain, StepScores([]), runtime=None).get_kv_connector_output() is moved


# ---- keys ----


class KeysBench(RuntimeBench):
    """Three layers in two readers that look at the right blocks and say of each page its own number."""

    def __init__(self, stock, **options):
        super().__init__(stock, **options)
        self.runtime.key_readers += [self.read_layer, self.read_two_layers]

    def read_layer(self, *, block_table, num_tokens, key_difference, layer_weight):
        """Requests are known by their blocks and told apart by those they share with nobody."""
        assert layer_weight == 1 / NUM_LAYERS
        for row, tokens in enumerate(num_tokens):
            num_pages = -(-tokens // PAGE_TOKENS)
            blocks = block_table[row, :num_pages].tolist()
            (request_id,) = (r for r in self.manager._pages if self.resident_blocks(r) == blocks)
            live = self.scheduler.requests[request_id]
            assert tokens == live.num_computed_tokens - PAGE_TOKENS * len(self.holes(request_id))
            for column, page in enumerate(self.resident(request_id)):
                key_difference[row, column] += layer_weight * score_of(request_id, page)

    def read_two_layers(self, **arguments):
        for _ in range(2):
            self.read_layer(**arguments)

    def resident_blocks(self, request_id):
        return [self.blocks(request_id)[page].block_id for page in self.resident(request_id)]

    def check_scores(self, request_id, page_scores, observed):
        for page, value in zip(page_scores.pages.tolist(), page_scores.signals["keys"].tolist(), strict=True):
            assert value == pytest.approx(score_of(request_id, page), rel=1e-6)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["keydiff", "h2o-keydiff"])
def test_every_key_difference_comes_back_to_its_page_and_request(stock_config, policy, async_scheduling):
    run = load(
        KeysBench(stock_config, policy=policy, settings=SCORES, async_scheduling=async_scheduling, num_blocks=60)
    )
    assert len(run.reports) > 10 and run.manager.stats.num_evicted_pages > 20
    assert (run.observed == {}) == (policy == "keydiff")
