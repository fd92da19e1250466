"""The scheduler's side of `--kv-eviction-positions rebase`: when a request's pages move down, and what that takes.

Three numbers stay apart: tokens seen (vLLM's ``num_computed_tokens``), the write slot (the logical page), and the
rotary position = tokens seen - offset. Only the last is rebased. The offset is a whole number of pages, so that a
page's tokens stay neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_evict.engine.messages import PageCopy, Rebase


class PositionKeeper:
    """Keeps rotary positions below the model's limit, and lets no page turn that others can reach.

    Args:
        limit_tokens: positions that the model was made for.
        page_tokens: tokens in a page.
        block_pool: vLLM's.

    """

    def __init__(self, limit_tokens: int, page_tokens: int, block_pool: BlockPool) -> None:
        self._limit_tokens = limit_tokens
        self._page_tokens = page_tokens
        self._pool = block_pool
        self._rebases: dict[str, Rebase] = {}
        self._filled_now: set[int] = set()

    def new_step_starts(self) -> None:
        """What was computed in the steps before may be moved."""
        self._filled_now.clear()

    def filled(self, blocks: Sequence[KVCacheBlock]) -> None:
        """These blocks are found by prefix look-ups from now on, and written by this step's forward pass."""
        self._filled_now.update(block.block_id for block in blocks)

    def is_due(self, num_tokens: int, offset_pages: int) -> bool:
        """Whether the last of ``num_tokens`` tokens would stand past the limit."""
        return num_tokens - offset_pages * self._page_tokens > self._limit_tokens

    def num_copies(self, blocks: Sequence[KVCacheBlock], resident: Sequence[int], num_holders: int) -> int:
        """Blocks that moving would take.

        Args:
            blocks: of the request, by logical page.
            resident: the pages that move.
            num_holders: reference count above which a block is somebody else's too.

        """
        return sum(blocks[page].ref_cnt > num_holders for page in _moving(resident))

    def must_wait(self, blocks: Sequence[KVCacheBlock], resident: Sequence[int]) -> bool:
        """Whether a page of a prefix hit is only computed in this step's forward pass, too late to be moved before."""
        return any(blocks[page].block_id in self._filled_now for page in _moving(resident))

    def rebase(self, request_id: str, blocks: list[KVCacheBlock], resident: Sequence[int]) -> Rebase:
        """Move the resident pages down to consecutive positions; ``blocks`` gets the copies in place.

        A page that others hold is copied; one that the prefix cache offers is taken out of it. The first pages, before
        any hole, stay where they are and go on being shared.
        """
        copies = []
        for page in _moving(resident):
            block = blocks[page]
            if block.ref_cnt > 1:
                [blocks[page]] = self._pool.get_new_blocks(1)
                self._pool.free_blocks([block])
                copies.append(PageCopy(page, block.block_id, blocks[page].block_id))
            elif block.block_hash is not None:
                self._pool.evict_blocks({block.block_id})
        rebase = Rebase(len(blocks) - len(resident), tuple(resident), tuple(copies))
        self._rebases[request_id] = rebase
        return rebase

    def forget(self, request_id: str) -> None:
        """The request is gone, or preempted in the step that would have moved its pages."""
        self._rebases.pop(request_id, None)

    def take(self) -> dict[str, Rebase]:
        """This step's rebases, in the order they were decided in."""
        rebases, self._rebases = self._rebases, {}
        return rebases


def _moving(resident: Sequence[int]) -> list[int]:
    """Those with a hole before them."""
    return [page for place, page in enumerate(resident) if page != place]
