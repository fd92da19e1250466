"""What all policies share: who may be evicted at all, and how many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vllm_evict.pages import EvictionPlan, PageBudget, PageView


@dataclass(frozen=True)
class EvictionPolicy(ABC):
    """Ranks pages; the base decides which of them are open to eviction.

    Never evicted: sink and pinned pages, the newest ``recent_pages`` pages, pages with a
    token that is not fully processed (so also the page being written). Of the
    rest the lowest-ranked go first, the older first among equals, until the
    request is within its budget.
    """

    signals: ClassVar[tuple[str, ...]] = ()
    """What the engine must measure for this policy, of ``pages.SIGNALS``."""

    evicts: ClassVar[bool] = True
    """False only for the control that never evicts."""

    @abstractmethod
    def rank(self, view: PageView) -> np.ndarray:
        """float64 ``[n]`` aligned with ``view.pages``: higher = keep, NaN = too young to judge."""

    def plan(self, view: PageView, budget: PageBudget) -> EvictionPlan:
        """The pages to evict now so that ``view`` fits ``budget``.

        A page nobody has judged yet (NaN) goes only when no judged page is left:
        new pages are on trial before they compete.
        """
        num_victims = budget.excess_pages(len(view.pages))
        if num_victims == 0 or not self.evicts:
            return EvictionPlan()
        pages, _ = self.ranked(view, budget)
        return EvictionPlan(tuple(sorted(pages[:num_victims].tolist())))

    def ranked(self, view: PageView, budget: PageBudget) -> tuple[np.ndarray, np.ndarray]:
        """All pages that no rule protects, first to go first, and their ranks (float64, NaN = not judged yet)."""
        candidates = evictable(view, budget).nonzero()[0]
        rank = self.rank(view)[candidates]
        # A stable sort over ascending pages breaks ties towards the oldest, and NaN comes last.
        order = rank.argsort(kind="stable")
        return view.pages[candidates[order]], rank[order]


def evictable(view: PageView, budget: PageBudget) -> np.ndarray:
    """bool ``[n]``: which of ``view.pages`` no rule protects."""
    newest_page = (view.num_tokens - 1) // budget.page_tokens
    first_recent_page = newest_page - budget.recent_pages + 1
    num_processed_pages = view.num_processed_tokens // budget.page_tokens
    free = (view.pages >= budget.sink_pages) & (view.pages < min(first_recent_page, num_processed_pages))
    if budget.pinned_pages:
        free &= ~np.isin(view.pages, budget.pinned_pages)
    return free
