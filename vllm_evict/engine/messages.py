"""What scheduler and worker tell each other about eviction, once a step.

Both ride as one attribute on vLLM's own objects, which pickle their ``__dict__``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

_ATTRIBUTE = "kv_eviction"


class PageCopy(NamedTuple):
    """A page that others can reach is copied before it changes.

    Args:
        page: logical page of the request.
        source: block that holds it, and goes on holding it for the others.
        block: block that holds the request's own copy from now on.

    """

    page: int
    source: int
    block: int


@dataclass(frozen=True)
class Rebase:
    """One request's resident pages move down to consecutive rotary positions, before the step's forward pass.

    Args:
        offset_pages: rotary position = position - ``offset_pages`` pages, for tokens from this step on.
        pages: the logical pages that move, ascending; the ``i``-th one starts at rotary position ``i`` pages.
            Those that the step opens, and writes at their new positions, are not among them.
        copies: pages to copy first.

    """

    offset_pages: int
    pages: tuple[int, ...]
    copies: tuple[PageCopy, ...] = ()


@dataclass(frozen=True)
class EvictionUpdate:
    """Scheduler to worker, on the ``SchedulerOutput``.

    Args:
        holes: ``{request id: logical pages evicted since the last step}``; for a
            request that (re)starts in this step, all of its holes.
        wanted: ``{request id: preemption epoch}``, requests whose scores the
            scheduler needs after this step.
        rebases: ``{request id: its rebase}``, to be carried out in this order: a block may leave one request and
            be another's copy in the same step.

    """

    holes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    rebases: dict[str, Rebase] = field(default_factory=dict)


@dataclass(frozen=True)
class PageScores:
    """Scores of one request's resident pages.

    Args:
        epoch: times the request had been preempted when the scores were asked for.
        pages: int32 ``[n]`` logical pages, ascending.
        signals: of each signal that the policy needs, float64 ``[n]``, higher =
            keep, NaN = not judged yet.

    """

    epoch: int
    pages: np.ndarray
    signals: dict[str, np.ndarray]

    def or_else(self, other: PageScores | None) -> PageScores:
        """These scores, and ``other``'s where nothing is known of a page."""
        if other is None or not any(np.isnan(values).any() for values in self.signals.values()):
            return self
        at = other.pages.searchsorted(self.pages)
        known = other.pages.take(at, mode="clip") == self.pages
        signals = {}
        for signal, values in self.signals.items():
            before = np.full(len(values), np.nan)
            before[known] = other.signals[signal][at[known]]
            signals[signal] = np.where(np.isnan(values), before, values)
        return PageScores(self.epoch, self.pages, signals)


@dataclass(frozen=True)
class ScoreReport:
    """Worker to scheduler, on the ``ModelRunnerOutput``.

    Args:
        scores: ``{request id: its scores}``.
        seconds: spent on measuring since the last report.

    """

    scores: dict[str, PageScores]
    seconds: float = 0.0


def attach_update(output: SchedulerOutput, update: EvictionUpdate) -> None:
    """Put ``update`` on the scheduler's output."""
    setattr(output, _ATTRIBUTE, update)


def update_of(output: SchedulerOutput) -> EvictionUpdate | None:
    """The update on ``output``; None where another scheduler made it."""
    return getattr(output, _ATTRIBUTE, None)


def attach_report(output: ModelRunnerOutput, report: ScoreReport) -> None:
    """Put ``report`` on the runner's output (never on vLLM's shared empty one)."""
    setattr(output, _ATTRIBUTE, report)


def report_of(output: ModelRunnerOutput) -> ScoreReport | None:
    """The report on ``output``, if any."""
    return getattr(output, _ATTRIBUTE, None)
