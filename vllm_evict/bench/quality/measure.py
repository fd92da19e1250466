"""Reads stretches of text with each way of keeping a cache, and compares with the full cache.

Of a stretch's second half: what the full cache would have said next (*plain text*). Then each passage again, as if it
came up once more right after the stretch (*recall*): a model that can still look at it completes it word for word.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

from vllm_evict.bench.quality.cases import Context
from vllm_evict.bench.quality.replay import ATTENTION, Method, Replay
from vllm_evict.bench.quality.results import Measured
from vllm_evict.reference import EvictingCache


class Meter:
    """Compares a method's predictions with the full cache's, position by position."""

    def __init__(self, full: torch.Tensor, targets: torch.Tensor) -> None:
        """`full`: log-probabilities of the full cache, float32 [positions, vocabulary]; `targets`: long [positions]."""
        self.full, self.targets = full, targets

    def compare(self, logits: torch.Tensor, start: int) -> torch.Tensor:
        """Sums over the positions from `start` on of (KL, agreement, loss, accuracy) for float [count, vocabulary]."""
        stop = start + len(logits)
        full, targets = self.full[start:stop], self.targets[start:stop]
        mine = logits.float().log_softmax(dim=-1)
        kl = (full.exp() * (full - mine)).sum(dim=-1)
        first = mine.argmax(dim=-1)
        return torch.stack(
            [
                kl.sum(),
                (first == full.argmax(dim=-1)).sum(),
                cross_entropy(mine, targets, reduction="sum"),
                (first == targets).sum(),
            ]
        ).double()


@dataclass
class Case:
    """Something to be predicted: `tokens` after `before`; of the plain text `before` is empty."""

    context: Context
    place: int
    tokens: torch.Tensor
    first: int
    """The first position of `tokens` that counts."""
    meter: Meter | None = None

    @property
    def num_positions(self) -> int:
        return len(self.tokens) - 1 - self.first


def cases_of(context: Context) -> list[Case]:
    """The plain text, then each passage."""
    passages = [Case(context, place, context.passage(place), 0) for place in context.places]
    return [Case(context, -1, context.tokens, len(context.tokens) // 2), *passages]


@torch.inference_mode()
def read_full(model: PreTrainedModel, cases: Sequence[Case]) -> list[Measured]:
    """Fill in the meters of one context's cases; what the full cache itself scores."""
    plain, *passages = cases
    cache = DynamicCache()
    measured = []
    for case in (plain, *passages):
        held = cache if case is plain else copy.deepcopy(cache)
        with _attention(model, "sdpa"):
            hidden = model.base_model(input_ids=case.tokens[None], past_key_values=held).last_hidden_state[0]
        full = model.lm_head(hidden[case.first : -1]).float().log_softmax(dim=-1)
        case.meter = Meter(full, case.tokens[case.first + 1 :])
        measured.append(_measured("full cache", 0, 0, case, case.meter.compare(full, 0)))
    return measured


@torch.inference_mode()
def read_methods(
    model: PreTrainedModel, cases: Sequence[Case], methods: Sequence[Method], chunk_tokens: int
) -> Iterator[Measured]:
    """All cases of one context under methods of one budget."""
    plain, *passages = cases
    replay = Replay(model, methods, chunk_tokens)
    for case in (plain, *passages):
        reader = replay if case is plain else copy.deepcopy(replay)
        sums = torch.zeros(len(methods), 4, dtype=torch.float64)
        for start, hidden in reader.read(case.tokens):
            at, counted = _counted(case, start, hidden)
            for row in range(len(counted)):
                got = case.meter.compare(model.lm_head(counted[row]), at)
                sums[row if len(counted) > 1 else slice(None)] += got
        for row, total in zip(reader.rows, sums, strict=True):
            method = row.method
            yield _measured(method.name, method.page_tokens, method.config.budget, case, total)


def _counted(case: Case, start: int, hidden: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Of a chunk [rows, chunk, hidden] that begins at `start` what counts, and where that lies among all that does."""
    first = max(case.first - start, 0)
    last = len(case.tokens) - 1 - start  # nothing follows the last token
    return max(start - case.first, 0), hidden[:, first:last]


@torch.inference_mode()
def read_reference(
    model: PreTrainedModel, name: str, cache: EvictingCache, cases: Sequence[Case], chunk_tokens: int
) -> Iterator[Measured]:
    """All cases of one context with a token-level cache of `vllm_evict.reference`."""
    for case in cases:
        held = cache if case.place < 0 else copy.deepcopy(cache)  # the plain text comes first
        total = torch.zeros(4, dtype=torch.float64)
        with _attention(model, "eager"), held.attached_to(model):
            for start in range(0, len(case.tokens) - 1, chunk_tokens):
                chunk = case.tokens[None, start : start + chunk_tokens]
                hidden = model.base_model(input_ids=chunk, past_key_values=held).last_hidden_state
                at, counted = _counted(case, start, hidden)
                total += case.meter.compare(model.lm_head(counted[0]), at)
        yield _measured(name, 0, cache.max_budget, case, total)


@contextmanager
def _attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Another attention function than the one that `Replay` needs."""
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)


def _measured(method: str, page_tokens: int, budget_tokens: int, case: Case, sums: torch.Tensor) -> Measured:
    means = (sums / case.num_positions).tolist()
    window_has = None if case.place < 0 or not budget_tokens else case.context.window_has(case.place, budget_tokens)
    return Measured(method, page_tokens, budget_tokens, case.context.number, case.place, window_has, *means)


class Clock:
    """Says how far a run has come."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._start = say, time.monotonic()

    def tick(self, what: str) -> None:
        self._say(f"{time.monotonic() - self._start:6.0f} s  {what}")
