"""The worker's eviction state: what the attention backend reads and reports in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

from vllm_evict.config import EvictionConfig
from vllm_evict.engine.decode_mass import DecodeMass
from vllm_evict.engine.host_copy import Arriving, HostCopy
from vllm_evict.engine.mass_ledger import MassLedger, ResidentPages
from vllm_evict.engine.mass_request import MakeObserved, MassRequest, Stopwatch
from vllm_evict.engine.messages import (
    EvictionUpdate,
    PageScores,
    ScoreReport,
    attach_report,
    update_of,
)
from vllm_evict.engine.positions import RotaryPositions
from vllm_evict.engine.resident import ResidentRequest, ResidentTable
from vllm_evict.engine.rows import BatchRows, RowBuffers
from vllm_evict.scores.aggregate import PageMass


class KeyReader(Protocol):
    """Measures keys in the caches of some layers."""

    def __call__(
        self, *, block_table: torch.Tensor, num_tokens: np.ndarray, key_difference: torch.Tensor, layer_weight: float
    ) -> None:
        """Add each layer's key difference (mean over its KV heads) times ``layer_weight``.

        Args:
            block_table: int32 ``[requests, max resident pages]``, zero-padded at the end.
            num_tokens: int32 ``[requests]`` tokens in resident pages.
            key_difference: float32 ``[requests, max resident pages]``, added to in place.
            layer_weight: as in ``MassRequest``.

        """


@dataclass
class StepScores:
    """What a step has measured, until its output is read.

    Args:
        ended: lives that ended before the step.
        spans: of each observed request, in the scheduler's order: how it stood, and the positions (int ``[q]``) of its
            queries.
        page_mass: float32 ``[observed queries, max pages]``, in the order of ``spans``.
        wanted: of each request whose scores the scheduler wants: its id, the preemption epoch, how it stood.
        key_difference: float32 ``[wanted, max pages]``, if keys are read.
        seconds: spent on measuring.

    """

    ended: list[int]
    spans: list[tuple[ResidentPages, np.ndarray]] = field(default_factory=list)
    page_mass: Arriving | None = None
    wanted: list[tuple[str, int, ResidentPages]] = field(default_factory=list)
    key_difference: Arriving | None = None
    seconds: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to book and nobody to tell."""
        return not (self.ended or self.spans or self.wanted)


class EvictionRuntime:
    """One per worker.

    Every rank sees the same steps and a part of the heads (tensor parallelism) or of the layers (pipelines), so what
    each has measured is brought together by ``combine`` before anybody decides: once a step for all requests. Ranks
    agree on what is measured in which order because it follows from the scheduler's output alone.

    Between ``begin_step`` and ``end_step`` the metadata builders ask ``batch_rows``
    for resident pages and ``mass_request`` for what to observe; outside of a step
    (profiling, warm-up, capture, idle data-parallel ranks) they see the persistent tensors as they are, and
    ``nobodys_mass`` observes nothing. Keys are
    looked at when the forward pass is over, and only of requests whose signals
    the scheduler wants: what a page's keys say does not depend on when it is asked.

    Measurements leave the device without anybody waiting. They are booked when vLLM reads the step's output, which
    it does in the order of the steps, be it at once or, with asynchronous scheduling, in a thread of its own.

    Args:
        config: what is measured, and when.
        group_id: index of the evicting KV cache group.
        page_tokens: tokens in a page.
        num_layers: layers that evict, those of other pipeline stages included.
        buffers: the rows' tensors.
        combine: see above; starts it, for a float32 tensor that is not used again. The default is for one rank.
        reports: whether the scheduler reads this rank's outputs, or only its part is wanted (all pipeline stages but
            the last).
        asynchronous: outputs may be read in another thread than steps run in.

    """

    def __init__(
        self,
        config: EvictionConfig,
        group_id: int,
        page_tokens: int,
        num_layers: int,
        buffers: RowBuffers,
        combine: Callable[[torch.Tensor], Arriving] = HostCopy,
        reports: bool = True,
        asynchronous: bool = False,
    ) -> None:
        self._config = config
        self._combine = combine
        self._reports = reports
        self._asynchronous = asynchronous
        self._layer_weight = 1 / num_layers
        self._page_tokens = page_tokens
        self.buffers = buffers
        signals = config.make_policy().signals
        self.observes_attention = "attention" in signals
        self.reads_keys = "keys" in signals
        self.rebases = config.rebases
        self.make_observed: MakeObserved
        self.decode_mass: DecodeMass | None = None
        self.key_readers: list[KeyReader] = []
        self.positions: RotaryPositions | None = None
        self._stopwatch = Stopwatch()
        self.table = ResidentTable(group_id)
        self._ledger = MassLedger(self._make_mass)
        self._update: EvictionUpdate | None = None
        self._ended: list[int] = []
        self._requests: list[ResidentRequest] = []
        self._rows: BatchRows | None = None
        self._mass: MassRequest | None = None
        self._spans: list[tuple[ResidentPages, np.ndarray]] = []
        self._max_pages = 0

    def _make_mass(self, first_query: int) -> PageMass:
        return PageMass(self._config.score, self._page_tokens, self._config.distant_tokens, first_query)

    # ---- the step --------------------------------------------------------------

    def begin_step(self, output: SchedulerOutput) -> None:
        """Apply holes and new pages before the forward pass."""
        self._update = update_of(output)
        assert self._update is not None, "the scheduler does not evict, but the worker does"
        moves = self.table.apply(output, self._update)
        if moves:
            assert self.positions is not None, "the scheduler rebases positions, but the worker does not"
            self.positions.carry_out(moves)
        ended = self.table.take_ended()
        self.buffers.end(ended)
        self._ended += ended
        self._rows = self._mass = None
        scheduled = [self.table[request_id] for request_id in output.num_scheduled_tokens]
        self._max_pages = max((len(request.pages) for request in scheduled), default=0)
        self._spans = list(self._spans_of(scheduled)) if self.observes_attention else []

    def end_step(
        self, output: ModelRunnerOutput | AsyncModelRunnerOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Book what was observed and attach the signals the scheduler wants, when ``output`` is read."""
        scores = self._take_scores()
        if scores.is_empty or not self._reports:
            return output
        if self._asynchronous or isinstance(output, AsyncModelRunnerOutput):
            return ScoredOutput(output, scores, self)
        return self.attach(scores, output)

    def attach(self, scores: StepScores, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Book ``scores``; ``output`` with the report, if anybody wants one. Once a step, in their order."""
        self._ledger.end(scores.ended)
        if scores.page_mass is not None:
            page_mass, start = scores.page_mass.array(), 0
            for request, positions in scores.spans:
                stop = start + len(positions)
                self._ledger.observe(request, positions, page_mass[start:stop, : len(request.pages)])
                start = stop
        if not scores.wanted:
            return output
        differences = scores.key_difference.array() if scores.key_difference is not None else None
        reported = {}
        for row, (request_id, epoch, request) in enumerate(scores.wanted):
            signals = {}
            if self.observes_attention:
                signals["attention"] = self._ledger.scores(request)
            if differences is not None:
                signals["keys"] = differences[row, : len(request.pages)].astype(np.float64)
            reported[request_id] = PageScores(epoch, request.pages, signals)
        output = copy(output)  # vLLM's empty output is one shared object
        attach_report(output, ScoreReport(reported, scores.seconds))
        return output

    def _take_scores(self) -> StepScores:
        """What this step has measured, on its way to the host; ends the step."""
        assert self._update is not None
        wanted, self._update = self._update.wanted, None
        ended, self._ended = self._ended, []
        scores = StepScores(ended if self.observes_attention else [], self._spans)
        if self._spans:
            # No layer of this stage may evict.
            page_mass = self._mass.measured() if self._mass is not None else self._no_mass()
            scores.page_mass = self._combine(page_mass)
        if wanted:
            scores.wanted = [(r, epoch, ResidentPages.of(self.table[r])) for r, epoch in wanted.items()]
            if self.reads_keys:
                with self._stopwatch:
                    scores.key_difference = self._combine(self._read_keys([self.table[r] for r in wanted]))
            scores.seconds = self._stopwatch.take()
        self._rows = self._mass = None
        return scores

    @property
    def in_step(self) -> bool:
        """Whether a scheduled step is being executed."""
        return self._update is not None

    @property
    def step_requests(self) -> Sequence[ResidentRequest]:
        """This step's requests in the order of its rows. Valid after ``batch_rows``."""
        return self._requests

    # ---- what the backend asks ---------------------------------------------------

    def batch_rows(self, request_ids: Sequence[str], num_rows: int | None = None) -> BatchRows:
        """Resident pages of this step's rows, padded to ``num_rows``. Built once a step, shared by all layers."""
        if self._rows is None:
            self._requests = [self.table[request_id] for request_id in request_ids]
            self._rows = self.buffers.fill(self._requests, num_rows or len(self._requests))
            self._mass = self._observe(self._requests, self._rows) if self._spans else None
            if self._mass is None and self.decode_mass is not None:
                self.decode_mass.skip()
        return self._rows

    @property
    def mass_request(self) -> MassRequest | None:
        """What to observe in this step; None if nothing. Valid after ``batch_rows``."""
        return self._mass

    def _observe(self, requests: Sequence[ResidentRequest], rows: BatchRows) -> MassRequest:
        physical_lens = rows.physical_lens_cpu.numpy()
        places = {}
        first_token = 0
        for row, request in enumerate(requests):
            places[request.life] = row, first_token - request.num_computed_tokens
            first_token += request.num_scheduled_tokens
        tokens, row_of, visible = [], [], []
        for request, positions in self._spans:
            row, shift = places[request.life]
            tokens.append(positions + shift)
            row_of.append(np.full(len(positions), row))
            visible.append(physical_lens[row] - request.num_tokens + 1 + positions)
        token, row, visible_tokens = (np.concatenate(part).astype(np.int32) for part in (tokens, row_of, visible))
        assert rows.max_pages == self._max_pages, "the model runner left out a request"
        if self.decode_mass is not None and first_token == len(requests):
            return self.decode_mass.observe(row, visible_tokens, rows, self._layer_weight, self._stopwatch)
        observed = self.make_observed(token=token, row=row, visible_tokens=visible_tokens)
        block_table = rows.block_table[:, : rows.max_pages]
        return MassRequest(observed, block_table, self._no_mass(), self._layer_weight, self._stopwatch)

    def nobodys_mass(self, num_rows: int) -> MassRequest | None:
        """What a batch without requests asks of every layer, so that a CUDA graph captured with it can observe."""
        if self.decode_mass is None:
            return None
        self.decode_mass.skip()
        return self.decode_mass.for_capture(num_rows, self.buffers.block_table, self._layer_weight, self._stopwatch)

    def _no_mass(self) -> torch.Tensor:
        """Zeros, float32 ``[observed queries, max pages]``."""
        num_observed = sum(len(positions) for _, positions in self._spans)
        return torch.zeros(num_observed, self._max_pages, dtype=torch.float32, device=self.buffers.block_table.device)

    def _spans_of(self, requests: Iterable[ResidentRequest]) -> Iterator[tuple[ResidentPages, np.ndarray]]:
        for request in requests:
            positions = self._observed_positions(request.num_computed_tokens, request.num_scheduled_tokens)
            if len(positions):
                yield ResidentPages.of(request), positions

    def _observed_positions(self, first: int, num_queries: int) -> np.ndarray:
        """Positions, among this step's queries of a request, of those to observe.

        A function of the request's own positions: its company must not matter.
        """
        last = first + num_queries
        if num_queries == 1:
            every = self._config.score_every
            return np.arange(first, last) if last % every == 0 else np.empty(0, dtype=np.int64)
        if self._config.prefill_queries == "all":
            return np.arange(first, last)
        return np.arange(max(first, last - self._config.prefill_queries), last)

    def _read_keys(self, requests: Sequence[ResidentRequest]) -> torch.Tensor:
        """float32 ``[requests, max pages]`` key difference of the resident pages."""
        block_table, num_tokens = self.buffers.table_of(requests)
        key_difference = torch.zeros(block_table.shape, dtype=torch.float32, device=block_table.device)
        for read in self.key_readers:
            read(
                block_table=block_table,
                num_tokens=num_tokens,
                key_difference=key_difference,
                layer_weight=self._layer_weight,
            )
        return key_difference


class ScoredOutput(AsyncModelRunnerOutput):
    """A step's output and its scores, both read when vLLM reads the sampled tokens.

    Args:
        output: the model runner's.
        scores: of the same step.
        runtime: books them.

    """

    def __init__(
        self, output: ModelRunnerOutput | AsyncModelRunnerOutput, scores: StepScores, runtime: EvictionRuntime
    ) -> None:
        self._output = output
        self._scores = scores
        self._runtime = runtime

    def get_output(self) -> ModelRunnerOutput:
        """Wait for both."""
        output = self._output
        if isinstance(output, AsyncModelRunnerOutput):
            output = output.get_output()
        return self._runtime.attach(self._scores, output)

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Of the wrapped output: what vLLM 0.33 saves of a step when ``get_output`` fails. 0.32 does not ask."""
        if isinstance(self._output, AsyncModelRunnerOutput):
            return self._output.get_kv_connector_output()
        return self._output.kv_connector_output
