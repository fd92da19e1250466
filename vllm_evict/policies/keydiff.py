"""Keep the odd keys: pages whose keys are unlike the rest of the request's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vllm_evict.pages import PageView
from vllm_evict.policies.base import EvictionPolicy


@dataclass(frozen=True)
class KeyDiff(EvictionPolicy):
    """A page is worth how far its keys point away from the mean key of all resident tokens.

    Keys that resemble the mean say little that others do not say; odd ones are what a
    later question can find. Needs no attention, so it knows a page's worth at once.

    Based on KeyDiff (arXiv 2504.15364).
    Differs from the paper: the unit is a page (mean over its tokens); one decision
    serves all heads and layers (mean over both).
    """

    signals: ClassVar[tuple[str, ...]] = ("keys",)

    def rank(self, view: PageView) -> np.ndarray:
        return view.signals["keys"]
