"""Garbage where nobody may look: NaN in pages that nobody owns, loud numbers in slots not written yet.

vLLM's own kernel multiplies unwritten slots of the page being written by a weight of zero (seen: NaN there reaches the
output of plain vLLM too), so in pages that have an owner the garbage must be finite; it is a thousand times a key or
value of these models.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tests.engine.harness import Engine

LOUD = 3e4


def release_canaries(engine: Engine) -> None:
    """Fill the whole cache with NaN now, and every page given back unhashed; a page handed out is filled with `LOUD`.

    A freed page with a hash keeps its content, since a prefix look-up may still find it.
    """
    pool, caches = engine.pool, engine.kv_caches
    for cache in caches:
        cache.fill_(torch.nan)
    free_blocks, get_new_blocks = pool.free_blocks, pool.get_new_blocks

    def fill(blocks: Iterable, value: float) -> None:
        for block in blocks:
            for cache in caches:
                cache[block.block_id] = value

    def free_and_fill(ordered_blocks):
        blocks = list(ordered_blocks)
        free_blocks(blocks)
        fill((b for b in blocks if b.ref_cnt == 0 and b.block_hash is None and not b.is_null), torch.nan)

    def hand_out_and_fill(num_blocks):
        blocks = get_new_blocks(num_blocks)
        fill(blocks, LOUD)
        return blocks

    pool.free_blocks, pool.get_new_blocks = free_and_fill, hand_out_and_fill


def null_page_is_untouched(engine: Engine) -> bool:
    """Nobody wrote the null page."""
    null = engine.pool.null_block.block_id
    return all(bool(cache[null].isnan().all()) for cache in engine.kv_caches)
