"""The workers' side of the bookkeeping: which blocks each request still holds, in order.

Fed from ``SchedulerOutput`` alone, so it does not depend on the model runner.
State is keyed by request id, never by batch row, and the work per step depends on
resident pages only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_evict.engine.messages import EvictionUpdate, Rebase


@dataclass(frozen=True)
class PageMoves:
    """What a rebase asks of the KV caches: first the copies, then the moves.

    Args:
        sources: int32 ``[c]`` blocks to copy from.
        copies: int32 ``[c]`` blocks to copy to.
        block_ids: int32 ``[m]`` blocks whose keys move.
        pages_down: int32 ``[m]`` by how many pages their rotary positions go down.

    """

    sources: np.ndarray
    copies: np.ndarray
    block_ids: np.ndarray
    pages_down: np.ndarray


@dataclass
class ResidentRequest:
    """One request's resident pages.

    Args:
        life: number of this stretch between (re)start and preemption or end, unique in this process.
        first_query: tokens that were computed elsewhere when this life began (prefix cache).
        pages: int32 ``[n]`` logical pages, ascending. Replaced when it changes, never written to.
        block_ids: int32 ``[n]`` the block that holds each. Replaced as ``pages`` is.
        num_pages: logical pages so far, holes included.
        num_computed_tokens: tokens before this step (positions of its queries start here).
        num_scheduled_tokens: tokens of this step; 0 if it sits the step out.
        rotary_pages: int32 ``[n]`` rotary position of each page's first token, in pages.
        offset_pages: rotary position = position - this many pages, for tokens of this step.

    """

    life: int
    first_query: int
    pages: np.ndarray
    block_ids: np.ndarray
    num_pages: int
    num_computed_tokens: int
    num_scheduled_tokens: int = 0
    rotary_pages: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    offset_pages: int = 0

    @property
    def num_holes(self) -> int:
        """Logical pages that are gone."""
        return self.num_pages - len(self.pages)

    @property
    def num_tokens(self) -> int:
        """Tokens seen when this step is over, evicted ones included."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    def append(self, block_ids: Sequence[int]) -> None:
        """New pages at the end."""
        num_new = len(block_ids)
        pages = np.arange(self.num_pages, self.num_pages + num_new, dtype=np.int32)
        self.pages = np.append(self.pages, pages)
        self.rotary_pages = np.append(self.rotary_pages, pages - np.int32(self.offset_pages))
        self.block_ids = np.append(self.block_ids, np.asarray(block_ids, dtype=np.int32))
        self.num_pages += num_new

    def punch(self, holes: Sequence[int]) -> None:
        """Drop the logical pages in ``holes``; each must be resident."""
        kept = ~np.isin(self.pages, np.asarray(holes, dtype=np.int32), assume_unique=True)
        assert len(kept) - kept.sum() == len(holes), "a hole names a page that is not resident"
        self.pages = self.pages[kept]
        self.block_ids = self.block_ids[kept]
        self.rotary_pages = self.rotary_pages[kept]

    def stand_as(self, before: ResidentRequest) -> None:
        """Take over the rotary positions of the same request's life before, whose pages it kept.

        So it is with a session that is fed in pieces; who was preempted has no such life any more.
        """
        self.offset_pages = before.offset_pages
        self.rotary_pages = self.pages - np.int32(self.offset_pages)
        at = before.pages.searchsorted(self.pages)
        kept = self.pages < before.num_pages
        self.rotary_pages[kept] = before.rotary_pages[at[kept]]

    def rebase(self, rebase: Rebase) -> PageMoves:
        """Move the pages' rotary positions down; returns what that means for the caches.

        Pages that became holes since the decision, in the same step, are passed over.
        """
        copies = [copy for copy in rebase.copies if copy.page in self.pages]
        block_ids = self.block_ids.copy()
        block_ids[self.pages.searchsorted([copy.page for copy in copies])] = [copy.block for copy in copies]
        self.block_ids = block_ids
        moved = np.asarray(rebase.pages, dtype=np.int32)
        at = moved.searchsorted(self.pages).astype(np.int32)
        moves = moved.take(at, mode="clip") == self.pages
        rotary_pages = np.where(moves, at, self.pages - np.int32(rebase.offset_pages))
        pages_down = self.rotary_pages - rotary_pages
        self.rotary_pages, self.offset_pages = rotary_pages, rebase.offset_pages
        moves &= pages_down != 0
        return PageMoves(
            np.asarray([copy.source for copy in copies], dtype=np.int32),
            np.asarray([copy.block for copy in copies], dtype=np.int32),
            self.block_ids[moves],
            pages_down[moves],
        )


class ResidentTable:
    """All live requests of one KV cache group.

    Args:
        group_id: index of the group in ``block_ids`` tuples.

    """

    def __init__(self, group_id: int) -> None:
        self._group_id = group_id
        self._requests: dict[str, ResidentRequest] = {}
        self._lives = count()
        self._ended: list[int] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request_id: str) -> ResidentRequest:
        return self._requests[request_id]

    def take_ended(self) -> list[int]:
        """Lives that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def apply(self, output: SchedulerOutput, update: EvictionUpdate) -> list[PageMoves]:
        """Follow the scheduler through one step, before the step's forward pass.

        Returns:
            What to do to the caches, in this order.

        """
        for request_id in output.finished_req_ids | (output.preempted_req_ids or set()):
            self._end(request_id)
        scheduled = output.num_scheduled_tokens
        started = set()
        for new in output.scheduled_new_reqs:
            started.add(new.req_id)
            self._start(new.req_id, new.block_ids, new.num_computed_tokens, update)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[i]
            num_computed_tokens = cached.num_computed_tokens[i]
            if request_id in cached.resumed_req_ids:
                started.add(request_id)
                self._start(request_id, block_ids, num_computed_tokens, update)
                continue
            request = self._requests[request_id]
            request.num_computed_tokens = num_computed_tokens
            if block_ids is not None and block_ids[self._group_id]:
                request.append(block_ids[self._group_id])
        for request_id, holes in update.holes.items():
            if request_id not in started:
                self._requests[request_id].punch(holes)
        moves = [self._requests[request_id].rebase(rebase) for request_id, rebase in update.rebases.items()]
        for request_id, request in self._requests.items():
            if request_id not in scheduled:  # the tokens of its last step lie behind it now
                request.num_computed_tokens += request.num_scheduled_tokens
            request.num_scheduled_tokens = scheduled.get(request_id, 0)
        return moves

    def _start(
        self,
        request_id: str,
        block_ids: tuple[list[int], ...],
        num_computed_tokens: int,
        update: EvictionUpdate,
    ) -> None:
        before = self._requests.get(request_id)
        self._end(request_id)
        empty = np.empty(0, dtype=np.int32)
        request = ResidentRequest(next(self._lives), num_computed_tokens, empty, empty, 0, num_computed_tokens)
        request.append(block_ids[self._group_id])
        if request_id in update.holes:
            request.punch(update.holes[request_id])
        if before is not None:
            request.stand_as(before)
        self._requests[request_id] = request

    def _end(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._ended.append(request.life)
