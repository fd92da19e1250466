"""What a step asks of the attention layers: which queries to observe, and where their page mass goes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


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
class MassRequest:
    """What a scored step asks of every layer.

    Args:
        observed: the queries to observe, as the backend's own ``MakeObserved`` put them.
        block_table: int32 ``[rows, max resident pages]`` of :class:`BatchRows`.
        page_mass: float32 ``[observed queries, max resident pages]``, summed up
            by the layers: each adds its mean over query heads times ``layer_weight``.
        layer_weight: 1 / number of evicting layers, those of other pipeline stages included.
        stopwatch: adds up what measuring takes.
        enabled: int32 ``[1]`` on the device; where it is 0 the layers observe nothing. None = they do.
        chosen: int64 ``[queries asked for]`` lines of ``page_mass`` that somebody wants, in order. None = all of them.

    """

    observed: Any
    block_table: torch.Tensor
    page_mass: torch.Tensor
    layer_weight: float
    stopwatch: Stopwatch
    enabled: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    def measured(self) -> torch.Tensor:
        """The page mass asked for, float32 ``[queries asked for, max resident pages]``, in a tensor of its own."""
        return self.page_mass if self.chosen is None else self.page_mass.index_select(0, self.chosen)


@dataclass(frozen=True)
class DeviceQueries:
    """The observed queries of a step, on the device; each int32 ``[observed]`` as in ``MakeObserved``."""

    token: torch.Tensor
    row: torch.Tensor
    visible_tokens: torch.Tensor


class MakeObserved(Protocol):
    """How a backend wants the observed queries of a step."""

    def __call__(self, *, token: np.ndarray, row: np.ndarray, visible_tokens: np.ndarray) -> Any:
        """What its page mass kernel takes.

        Args:
            token: int32 ``[observed]`` index among the step's tokens.
            row: int32 ``[observed]`` row of the batch.
            visible_tokens: int32 ``[observed]`` resident tokens that the query may see, itself included.

        """
