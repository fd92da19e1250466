"""What the block manager knows of one request's pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vllm_evict.engine.messages import PageScores
from vllm_evict.pages import PageView
from vllm_evict.requests import RequestEviction


@dataclass
class RequestPages:
    """Eviction state of one request; lives exactly as long as its blocks.

    Args:
        eviction: policy and lengths.
        resident: logical pages held, ascending.
        num_pages: logical length of the request's block list, holes included.
        exact_tokens: leading tokens computed while everything before them was
            visible; None while that is all of them. Only these may be hashed.
        scores: the last report, or what a prefix hit is known by, or None.
        awaits_scores: scores were asked for and have not arrived.
        num_pages_asked: ``num_pages`` when scores were last asked for.
        offset_pages: rotary position = position - this many pages.

    """

    eviction: RequestEviction
    resident: list[int] = field(default_factory=list)
    num_pages: int = 0
    exact_tokens: int | None = None
    scores: PageScores | None = None
    awaits_scores: bool = False
    num_pages_asked: int = 0
    offset_pages: int = 0

    def view(self, num_tokens: int, num_processed_tokens: int) -> PageView:
        """What a policy is shown.

        Args:
            num_tokens: of the request, computed or in flight.
            num_processed_tokens: of them, those that a finished step has computed.

        """
        resident = np.asarray(self.resident, dtype=np.int32)
        signals = {signal: np.full(len(resident), np.nan) for signal in self.eviction.signals}
        if signals and self.scores is not None:
            # The report may be older than the last eviction: match by page.
            at = resident.searchsorted(self.scores.pages)
            known = resident.take(at, mode="clip") == self.scores.pages
            for signal, values in signals.items():
                values[at[known]] = self.scores.signals[signal][known]
        return PageView(resident, num_tokens, num_processed_tokens, signals)
