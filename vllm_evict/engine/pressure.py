"""Who gives up which page when the pool is short: the least important request first, of it the least valuable page."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(frozen=True)
class Offer:
    """A block that would come free if all its holders gave it up, which all of them can.

    Args:
        worth: ``(importance, rank)``, the highest of its holders; a rank is infinite if the page is not judged yet.
        block: it.
        holders: ``(request id, logical page)`` of each.

    """

    worth: tuple[int, float]
    block: KVCacheBlock
    holders: tuple[tuple[str, int], ...]


class Offers:
    """The offers of one step, which get fewer as they are taken.

    Args:
        pages: ``(request id, logical page, block, importance of the request, rank of the page)`` of everything that
            some rule lets go.

    """

    def __init__(self, pages: Iterable[tuple[str, int, KVCacheBlock, int, float]]) -> None:
        holders: dict[int, list[tuple[str, int]]] = defaultdict(list)
        worths: dict[int, tuple[int, float]] = {}
        blocks: dict[int, KVCacheBlock] = {}
        for request_id, page, block, importance, rank in pages:
            block_id, worth = block.block_id, (importance, math.inf if math.isnan(rank) else rank)
            blocks[block_id] = block
            holders[block_id].append((request_id, page))
            worths[block_id] = max(worths.get(block_id, worth), worth)
        offers = [Offer(worths[i], block, tuple(holders[i])) for i, block in blocks.items()]
        # Last is taken first.
        self._offers = sorted(
            (o for o in offers if len(o.holders) == o.block.ref_cnt), key=lambda o: o.worth, reverse=True
        )

    def take(self, num_pages: int, may_give: Callable[[str, int, KVCacheBlock, int], bool]) -> dict[str, list[int]]:
        """Up to ``num_pages`` blocks' worth.

        Args:
            num_pages: blocks to come free.
            may_give: whether a request still holds the page in that block and may give up that many pages, this one
                and those before it in this call.

        Returns:
            ``{request id: pages to give up}``.

        """
        taken: dict[str, list[int]] = defaultdict(list)
        while num_pages > 0 and self._offers:
            offer = self._offers.pop()
            if len(offer.holders) == offer.block.ref_cnt and all(
                may_give(request_id, page, offer.block, len(taken.get(request_id, ())) + 1)
                for request_id, page in offer.holders
            ):
                for request_id, page in offer.holders:
                    taken[request_id].append(page)
                num_pages -= 1
        return dict(taken)
