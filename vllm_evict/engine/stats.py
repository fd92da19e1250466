"""What eviction has done, counted in the scheduler and reported on vLLM's own statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_evict.pages import EvictionPlan, PageView


@dataclass
class EvictionStats:
    """Counters since start, and what came since the last :meth:`take_report`.

    Args:
        num_evicted_pages: pages taken from requests, since start.
        num_evictions: decisions that took any, since start.
        num_resident_pages: pages that live requests hold now.
        num_logical_pages: pages they would hold without eviction.
        keeps_shares: False where nobody takes reports, who would keep the lists short.

    """

    num_evicted_pages: int = 0
    num_evictions: int = 0
    num_resident_pages: int = 0
    num_logical_pages: int = 0
    keeps_shares: bool = True
    _evicted: Counter[tuple[str, str]] = field(default_factory=Counter)
    _mass_shares: list[float] = field(default_factory=list)
    _new: Counter[str] = field(default_factory=Counter)

    def evicted(self, policy: str, reason: str, view: PageView, plan: EvictionPlan, num_freed: int) -> None:
        """``plan`` was carried out on ``view``; ``num_freed`` of its pages went back to the pool."""
        self.num_evictions += 1
        self.num_evicted_pages += len(plan.pages)
        self._evicted[policy, reason] += len(plan.pages)
        self._new["freed"] += num_freed
        mass = view.signals.get("attention")
        if mass is not None and self.keeps_shares and (total := np.nansum(mass)) > 0:
            self._mass_shares.append(float(np.nansum(mass[np.isin(view.pages, plan.pages)]) / total))

    def preemption_saved(self) -> None:
        """A running request got its pages from others instead of being preempted (or preempting)."""
        self._new["preemptions_saved"] += 1

    def rebased(self, num_requests: int) -> None:
        """So many requests had their positions moved down."""
        self._new["rebases"] += num_requests

    def scored(self, seconds: float) -> None:
        """The workers spent ``seconds`` on measuring pages."""
        self._new["score_seconds"] += seconds

    def take_report(self, page_tokens: int) -> dict[str, Any]:
        """Everything since the last call, in types that msgspec carries."""
        report = {
            "evicted_pages": [[policy, reason, pages] for (policy, reason), pages in self._evicted.items()],
            "evicted_mass_shares": self._mass_shares,
            "resident_tokens": self.num_resident_pages * page_tokens,
            "logical_tokens": self.num_logical_pages * page_tokens,
            **self._new,
        }
        self._evicted, self._mass_shares, self._new = Counter(), [], Counter()
        return report
