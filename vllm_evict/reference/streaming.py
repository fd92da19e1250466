"""StreamingLLM: keep the first tokens, which soak up attention, and the newest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from vllm_evict.reference.cache import EvictingCache
from vllm_evict.reference.layer import EvictingLayer


class StreamingCache(EvictingCache):
    """A token is worth its position: the oldest one outside the sinks goes.

    Based on StreamingLLM (arXiv 2309.17453). ``sink_size=0`` is the plain window that the paper compares with.
    Differs from the paper: a step of several tokens (a prompt) attends to all of them before it is trimmed.

    Args:
        sink_size: first tokens, never evicted. The paper: 4.
        window_size: newest tokens, never evicted.
        positions: ``cache`` as in the paper, or ``original``; see :class:`EvictingCache`.

    """

    def __init__(self, sink_size: int = 4, window_size: int = 1020, positions: Literal["cache", "original"] = "cache"):
        super().__init__(sink_size + window_size, sink_size, window_size, positions=positions)

    def worth(self, layers: Sequence[EvictingLayer]) -> torch.Tensor:
        return layers[0].positions.double()
