"""Attention mass of every request, brought up to date in the order of the steps.

Under async scheduling a step's masses arrive when the resident table has already moved on to later steps, so they are
booked here against what was resident when the step ran. All calls come from the thread that reads outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from vllm_evict.engine.resident import ResidentRequest
from vllm_evict.scores.aggregate import PageMass


@dataclass(frozen=True)
class ResidentPages:
    """A request as it stood in one step.

    Args:
        life: of ``ResidentRequest``.
        first_query: of ``ResidentRequest``.
        pages: int32 ``[n]`` resident logical pages, ascending.
        num_tokens: tokens seen when the step is over.

    """

    life: int
    first_query: int
    pages: np.ndarray
    num_tokens: int

    @classmethod
    def of(cls, request: ResidentRequest) -> ResidentPages:
        """What ``request`` holds now; its arrays are never written to."""
        return cls(request.life, request.first_query, request.pages, request.num_tokens)


class MassLedger:
    """Masses by life; a page keeps its own through evictions and growth.

    Args:
        make_mass: builds the accumulator of a request whose first observed query can stand at the given position.

    """

    def __init__(self, make_mass: Callable[[int], PageMass]) -> None:
        self._make_mass = make_mass
        self._lives: dict[int, tuple[np.ndarray, PageMass]] = {}

    def __len__(self) -> int:
        return len(self._lives)

    def end(self, lives: Iterable[int]) -> None:
        """Forget requests that were preempted or are done."""
        for life in lives:
            self._lives.pop(life, None)

    def observe(self, request: ResidentPages, positions: np.ndarray, page_mass: np.ndarray) -> None:
        """Book what a step's observed queries saw: ``PageMass.observe`` says what the arrays are."""
        self._mass_of(request).observe(request.pages, positions, page_mass)

    def scores(self, request: ResidentPages) -> np.ndarray:
        """float64 ``[n]`` scores of the request's resident pages; NaN = not judged yet."""
        return self._mass_of(request).scores(request.pages, request.num_tokens)

    def _mass_of(self, request: ResidentPages) -> PageMass:
        pages, mass = self._lives.get(request.life) or (request.pages[:0], self._make_mass(request.first_query))
        if pages is not request.pages:
            kept = np.isin(pages, request.pages, assume_unique=True)
            mass.keep(kept)
            mass.append(len(request.pages) - int(kept.sum()))
            self._lives[request.life] = request.pages, mass
        return mass
