"""Keep heavy hitters and odd keys: the sum of a page's ranks in h2o and in keydiff."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vllm_evict.pages import PageView
from vllm_evict.policies.base import EvictionPolicy


@dataclass(frozen=True)
class H2OKeyDiff(EvictionPolicy):
    """A page is worth its place among the resident pages by attention plus its place by key difference.

    Attention so far foretells what running text needs, odd keys what a later question
    may ask for. Places, because the two are in units that do not compare. Only pages that both
    have judged take part; the others are too young.

    Based on H2O (arXiv 2306.14048) and KeyDiff (arXiv 2504.15364).
    """

    signals: ClassVar[tuple[str, ...]] = ("attention", "keys")

    def rank(self, view: PageView) -> np.ndarray:
        values = np.stack([view.signals[signal] for signal in self.signals])  # [2, n]
        judged = ~np.isnan(values).any(axis=0)
        rank = np.full(len(view.pages), np.nan)
        rank[judged] = sum(num_below(signal) for signal in values[:, judged])
        return rank


def num_below(values: np.ndarray) -> np.ndarray:
    """int64 ``[n]``: how many of ``values`` are smaller than each; equal values share a place."""
    return np.searchsorted(np.sort(values), values)
