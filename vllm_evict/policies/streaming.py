"""Keep the first tokens and the newest: StreamingLLM, by whole pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_evict.pages import PageView
from vllm_evict.policies.base import EvictionPolicy


@dataclass(frozen=True)
class Streaming(EvictionPolicy):
    """A page is worth its position, so the oldest page outside the sinks goes first.

    Based on StreamingLLM (arXiv 2309.17453).
    Differs from the paper: the unit is a page, and keys keep the rotation they
    were written with, so positions keep growing.
    """

    def rank(self, view: PageView) -> np.ndarray:
        # Counted back from the newest page, so that the oldest of several requests can be told.
        return (view.pages - view.pages.max(initial=0)).astype(np.float64)
