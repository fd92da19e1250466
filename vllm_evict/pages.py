"""Tokens, pages and plans: the arithmetic everything else shares.

A *page* is a vLLM KV block. *Logical page* ``i`` of a request holds tokens
``[i * page_tokens, (i + 1) * page_tokens)`` and keeps that number for life. An
evicted page leaves a *hole*; the pages still held are the *resident* pages.

Nothing here imports torch or vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

SIGNALS = ("attention", "keys")
"""What can be measured of a page, one number each, higher = keep; a policy names those it needs.

attention: attention the page received, as ``--kv-eviction-score`` counts it (:mod:`vllm_evict.scores.aggregate`).
keys:      how unlike the others its keys are (:mod:`vllm_evict.scores.reference`, key difference).
"""


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages needed to hold ``num_tokens`` tokens (0 tokens need 0 pages)."""
    return -(-num_tokens // page_tokens)


@dataclass(frozen=True)
class PageBudget:
    """A request's budget in whole pages.

    Args:
        page_tokens: tokens in a page (vLLM's block size).
        budget_pages: pages a request may hold when a step begins, the page
            being written counted in. ``None`` means unlimited.
        sink_pages: leading pages that are never evicted.
        recent_pages: newest pages that are never evicted, the page being
            written counted in. At least 1.
        pinned_pages: further logical pages that are never evicted.

    """

    page_tokens: int
    budget_pages: int | None
    sink_pages: int
    recent_pages: int
    pinned_pages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.page_tokens > 0 and self.sink_pages >= 0 and self.recent_pages >= 1
        num_pinned = sum(page >= self.sink_pages for page in self.pinned_pages)
        assert self.budget_pages is None or self.budget_pages >= self.sink_pages + num_pinned + self.recent_pages

    def excess_pages(self, num_resident_pages: int) -> int:
        """How many of ``num_resident_pages`` are over the budget."""
        if self.budget_pages is None:
            return 0
        return max(num_resident_pages - self.budget_pages, 0)


def steady_pages(budget_pages: int) -> int:
    """Pages a decoding request holds at most: the budget, and the page a step opens."""
    return budget_pages + 1


def peak_pages(budget_pages: int, max_in_flight_tokens: int, page_tokens: int) -> int:
    """Pages a request holds at most, prefill included.

    The one bound of start-up sizing, admission and observation: a step begins
    at the budget, and until the next trim at most ``max_in_flight_tokens``
    (vLLM's own figure: one chunk per step in flight) are added; one page more
    because a chunk may start inside a page.
    """
    return budget_pages + pages_for(max_in_flight_tokens, page_tokens) + 1


@dataclass(frozen=True)
class PageView:
    """What a policy may know about one request when a step begins.

    Args:
        pages: int32 ``[n]``, the resident logical pages, ascending.
        num_tokens: tokens scheduled so far, in-flight ones included.
        num_processed_tokens: tokens whose step has finished; only pages wholly
            below this may be evicted.
        signals: of each signal that the policy needs (see ``SIGNALS``), float64
            ``[n]`` aligned with ``pages``, higher = keep; NaN where the page has
            not been judged yet.

    """

    pages: np.ndarray
    num_tokens: int
    num_processed_tokens: int
    signals: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class EvictionPlan:
    """Logical pages to evict, ascending. May be empty."""

    pages: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pages)
