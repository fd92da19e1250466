"""The worker's eviction state: what the attention backend reads and reports in one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_evict.config import EvictionConfig
from vllm_evict.engine.messages import (
    EvictionUpdate,
    PageScores,
    ScoreReport,
    attach_report,
    update_of,
)
from vllm_evict.engine.positions import RotaryPositions
from vllm_evict.engine.resident import ResidentRequest, ResidentTable
from vllm_evict.scores.aggregate import PageMass
from vllm_evict.scores.cpu import ObservedQueries


class Stopwatch:
    """Seconds spent inside ``with`` blocks."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._started

    def take(self) -> float:
        """The seconds so far; starts again at 0."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass(frozen=True)
class BatchRows:
    """A batch seen through resident pages, row by row as the model runner ordered it.

    Args:
        block_table: int32 ``[rows, max resident pages]``, resident block ids,
            zero-padded at the end.
        physical_lens: int32 ``[rows]`` tokens in resident pages, this step's included.

    """

    block_table: torch.Tensor
    physical_lens: torch.Tensor


@dataclass(frozen=True)
class MassRequest:
    """What a scored step asks of every layer.

    Args:
        observed: the queries to observe.
        block_table: as in :class:`BatchRows`.
        page_mass: float32 ``[observed queries, max resident pages]``, summed up
            by the layers: each adds its mean over query heads times ``layer_weight``.
        layer_weight: 1 / number of evicting layers.
        stopwatch: adds up what measuring takes.

    """

    observed: ObservedQueries
    block_table: torch.Tensor
    page_mass: torch.Tensor
    layer_weight: float
    stopwatch: Stopwatch


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
            layer_weight: 1 / number of evicting layers.

        """


class EvictionRuntime:
    """One per worker.

    Every tensor-parallel rank sees the same steps and a part of the heads, so what each has measured
    is brought together by ``mean_over_ranks`` before anybody decides: once a step for all requests.

    Between ``begin_step`` and ``end_step`` the metadata builders ask ``batch_rows``
    for resident pages and ``mass_request`` for what to observe; outside of a step
    (profiling, warm-up) both answer None and vLLM's own metadata stands. Keys are
    looked at when the forward pass is over, and only of requests whose signals
    the scheduler wants: what a page's keys say does not depend on when it is asked.
    """

    def __init__(
        self,
        config: EvictionConfig,
        group_id: int,
        page_tokens: int,
        num_layers: int,
        mean_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._config = config
        self._mean_over_ranks = mean_over_ranks
        self._layer_weight = 1 / num_layers
        self._page_tokens = page_tokens
        signals = config.make_policy().signals
        self.observes_attention = "attention" in signals
        self.reads_keys = "keys" in signals
        self.rebases = config.rebases
        self.key_readers: list[KeyReader] = []
        self.positions: RotaryPositions | None = None
        self._stopwatch = Stopwatch()
        self.table = ResidentTable(group_id, self._make_mass if self.observes_attention else None)
        self._update: EvictionUpdate | None = None
        self._request_ids: Sequence[str] = ()
        self._rows: BatchRows | None = None
        self._mass: MassRequest | None = None
        self._mass_spans: list[tuple[str, np.ndarray]] = []

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
        self._rows = self._mass = None

    def end_step(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Fold in what was observed; attach the signals the scheduler wants."""
        assert self._update is not None
        self._fold()
        wanted, self._update = self._update.wanted, None
        self._rows = self._mass = None
        if not wanted:
            return output
        with self._stopwatch:
            keys = self._read_keys(wanted) if self.reads_keys else {}
        scores = {}
        for request_id, epoch in wanted.items():
            request = self.table[request_id]
            signals = {}
            if request.mass is not None:
                num_tokens = request.num_computed_tokens + request.num_scheduled_tokens
                signals["attention"] = request.mass.scores(request.pages, num_tokens)
            if request_id in keys:
                signals["keys"] = keys[request_id]
            scores[request_id] = PageScores(epoch, request.pages, signals)
        output = copy(output)  # vLLM's empty output is one shared object
        attach_report(output, ScoreReport(scores, self._stopwatch.take()))
        return output

    @property
    def in_step(self) -> bool:
        """Whether a scheduled step is being executed."""
        return self._update is not None

    # ---- what the backend asks ---------------------------------------------------

    def batch_rows(self, request_ids: Sequence[str]) -> BatchRows:
        """Resident pages of this step's rows. Built once a step, shared by all layers."""
        if self._rows is None:
            requests = [self.table[request_id] for request_id in request_ids]
            self._request_ids = request_ids
            self._rows = self._rows_of(requests)
            self._mass = self._observe(requests) if self.observes_attention else None
        return self._rows

    def _rows_of(self, requests: Sequence[ResidentRequest]) -> BatchRows:
        width = max(len(request.pages) for request in requests)
        block_table = np.zeros((len(requests), width), dtype=np.int32)
        physical_lens = np.empty(len(requests), dtype=np.int32)
        for row, request in enumerate(requests):
            block_table[row, : len(request.block_ids)] = request.block_ids
            num_tokens = request.num_computed_tokens + request.num_scheduled_tokens
            physical_lens[row] = num_tokens - request.num_holes * self._page_tokens
        return BatchRows(torch.from_numpy(block_table), torch.from_numpy(physical_lens))

    @property
    def mass_request(self) -> MassRequest | None:
        """What to observe in this step; None if nothing. Valid after ``batch_rows``."""
        return self._mass

    def _observe(self, requests: Sequence[ResidentRequest]) -> MassRequest | None:
        assert self._rows is not None
        physical_lens = self._rows.physical_lens.numpy()
        tokens, rows, visible = [], [], []
        self._mass_spans = []
        first_token = 0
        for row, request in enumerate(requests):
            num_queries = request.num_scheduled_tokens
            positions = self._observed_positions(request.num_computed_tokens, num_queries)
            if len(positions):
                offsets = positions - request.num_computed_tokens
                tokens.append(first_token + offsets)
                rows.append(np.full(len(positions), row))
                visible.append(physical_lens[row] - num_queries + 1 + offsets)
                self._mass_spans.append((self._request_ids[row], positions))
            first_token += num_queries
        if not tokens:
            return None
        observed = ObservedQueries(
            token=np.concatenate(tokens).astype(np.int32),
            row=np.concatenate(rows).astype(np.int32),
            visible_tokens=np.concatenate(visible).astype(np.int32),
        )
        width = self._rows.block_table.shape[1]
        page_mass = torch.zeros(len(observed.token), width, dtype=torch.float32)
        return MassRequest(observed, self._rows.block_table, page_mass, self._layer_weight, self._stopwatch)

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

    def _read_keys(self, request_ids: Iterable[str]) -> dict[str, np.ndarray]:
        """float64 ``[n]`` key difference of each request's resident pages."""
        assert self.key_readers, "no layer's keys can be read"
        requests = {request_id: self.table[request_id] for request_id in request_ids}
        rows = self._rows_of(list(requests.values()))
        key_difference = torch.zeros(rows.block_table.shape, dtype=torch.float32)
        for read in self.key_readers:
            read(
                block_table=rows.block_table,
                num_tokens=rows.physical_lens.numpy(),
                key_difference=key_difference,
                layer_weight=self._layer_weight,
            )
        differences = self._reduced(key_difference).numpy().astype(np.float64)
        return {
            request_id: differences[row, : len(request.pages)]
            for row, (request_id, request) in enumerate(requests.items())
        }

    def _reduced(self, measured: torch.Tensor) -> torch.Tensor:
        return measured if self._mean_over_ranks is None else self._mean_over_ranks(measured)

    def _fold(self) -> None:
        """Add the step's page masses to the requests they belong to."""
        if self._mass is None:
            return
        page_mass = self._reduced(self._mass.page_mass).numpy()
        start = 0
        for request_id, positions in self._mass_spans:
            request = self.table[request_id]
            stop = start + len(positions)
            assert request.mass is not None
            request.mass.observe(request.pages, positions, page_mass[start:stop, : len(request.pages)])
            start = stop
