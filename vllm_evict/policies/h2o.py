"""Keep the heavy hitters: pages that later tokens attend to, by whole pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vllm_evict.pages import PageView
from vllm_evict.policies.base import EvictionPolicy


@dataclass(frozen=True)
class H2O(EvictionPolicy):
    """A page is worth the attention it received (``--kv-eviction-score`` says how counted).

    Based on H2O, Heavy-Hitter Oracle (arXiv 2306.14048).
    Differs from the paper: the unit is a page; one decision serves all heads and
    layers (attention probability averaged over both); the paper's running sum is
    the score ``sum``, and the default ``distant-mean`` counts only queries that
    stand well behind the page, which puts old and young pages on equal terms.
    """

    signals: ClassVar[tuple[str, ...]] = ("attention",)

    def rank(self, view: PageView) -> np.ndarray:
        return view.signals["attention"]
