"""Evict at random: the control any score has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_evict.pages import PageView
from vllm_evict.policies.base import EvictionPolicy


@dataclass(frozen=True)
class RandomPages(EvictionPolicy):
    """Uniform over the unprotected pages.

    Args:
        seed: the same seed and token count give the same choice, whatever else
            is in the batch.

    """

    seed: int = 0

    def rank(self, view: PageView) -> np.ndarray:
        return np.random.default_rng((self.seed, view.num_tokens)).random(len(view.pages))
