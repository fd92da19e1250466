"""What was last reported of a page, kept beside its hash for whoever hits it next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_evict.engine.messages import PageScores


class PriorScores:
    """The last score of every hashed block, by block; a score counts only while the block has the same hash.

    A hit page nobody has scored stays NaN, on trial as a new page is, until its new owner has looked at it.
    Holds at most one entry per block of the pool.
    """

    def __init__(self) -> None:
        self._scores: dict[int, tuple[bytes, dict[str, float]]] = {}

    def remember(self, scores: PageScores, blocks: Sequence[KVCacheBlock]) -> None:
        """Keep a request's report; ``blocks`` is its block list, by logical page."""
        for i, page in enumerate(scores.pages.tolist()):
            block = blocks[page]
            known = {signal: values[i] for signal, values in scores.signals.items() if not np.isnan(values[i])}
            if block.block_hash is not None and known:
                self._scores[block.block_id] = (block.block_hash, known)

    def recall(self, blocks: Sequence[KVCacheBlock], signals: Sequence[str]) -> PageScores | None:
        """float64 ``[len(blocks)]`` per signal, NaN where nothing is known; None if nothing is of any block."""
        recalled = {signal: np.full(len(blocks), np.nan) for signal in signals}
        for i, block in enumerate(blocks):
            block_hash, known = self._scores.get(block.block_id, (None, {}))
            if block_hash is not None and block_hash == block.block_hash:
                for signal, values in recalled.items():
                    values[i] = known.get(signal, np.nan)
        if all(np.isnan(values).all() for values in recalled.values()):
            return None
        return PageScores(0, np.arange(len(blocks), dtype=np.int32), recalled)
