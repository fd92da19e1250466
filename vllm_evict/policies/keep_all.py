"""Keep every page: the control that shows what the machinery alone costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vllm_evict.pages import PageView
from vllm_evict.policies.base import EvictionPolicy


@dataclass(frozen=True)
class KeepAll(EvictionPolicy):
    """Never evicts; tokens equal those of vLLM without the plugin."""

    evicts: ClassVar[bool] = False

    def rank(self, view: PageView) -> np.ndarray:
        return np.zeros(len(view.pages))
