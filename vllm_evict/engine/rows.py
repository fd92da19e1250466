"""A batch seen through resident pages: the tensors that attention reads, at the same addresses in every step.

Each request's block ids lie in a slot of their own, written when they change; a step gathers the slots of its rows.
What a step uploads is therefore one slot index and one length per row, however long the requests are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_evict.engine.host_copy import to_device
from vllm_evict.engine.resident import ResidentRequest

Gather = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]
"""``vllm_evict.scores.triton.gather_rows``, or what does the same."""


@dataclass(frozen=True)
class BatchRows:
    """A step's rows in the model runner's order, padding rows (no pages, length 0) at the end.

    Args:
        block_table: int32 ``[rows, max pages]`` resident block ids in logical order; zero from a row's end on.
        physical_lens: int32 ``[rows]`` tokens in resident pages, this step's included.
        physical_lens_cpu: the same on the host.
        max_pages: most resident pages of a row.

    """

    block_table: torch.Tensor
    physical_lens: torch.Tensor
    physical_lens_cpu: torch.Tensor
    max_pages: int


def gather_rows(
    table: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    out_table: torch.Tensor,
    out_lens: torch.Tensor,
    page_tokens: int,
) -> None:
    """The rows of ``slots`` (-1 = an empty one) into ``out_table`` and ``out_lens``; ``lens`` is by slot."""
    num_rows, empty = len(slots), slots < 0
    slots = slots.clamp(min=0)
    torch.index_select(table, 0, slots, out=out_table[:num_rows]).masked_fill_(empty[:, None], 0)
    torch.index_select(lens, 0, slots, out=out_lens[:num_rows]).masked_fill_(empty, 0)


class RowBuffers:
    """The persistent tensors behind ``BatchRows``. A CUDA graph may hold on to ``block_table`` and ``physical_lens``.

    On a GPU everything is queued on the current stream, so a step still running reads its own rows.

    Args:
        max_rows: most requests of a batch, and most that live at once.
        max_pages: most pages a request can hold.
        page_tokens: tokens in a page.
        device: of the tensors.

    """

    gather: Gather = staticmethod(gather_rows)

    def __init__(self, max_rows: int, max_pages: int, page_tokens: int, device: torch.device) -> None:
        self.block_table = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device)
        self.physical_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._slots = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device)
        self._page_tokens = page_tokens
        self._device = device
        self._lens = np.zeros(max_rows, dtype=np.int32)
        self._free_slots = list(range(max_rows))
        self._slot_of: dict[int, int] = {}
        self._written: list[np.ndarray | None] = [None] * max_rows
        self._num_written = [0] * max_rows

    def end(self, lives: Iterable[int]) -> None:
        """Give back the slots of requests that are gone."""
        for life in lives:
            slot = self._slot_of.pop(life, None)
            if slot is not None:
                self._free_slots.append(slot)
                self._written[slot] = None

    def fill(self, requests: Sequence[ResidentRequest], num_rows: int) -> BatchRows:
        """The rows of ``requests``, padded to ``num_rows``."""
        lens, slots = np.zeros(num_rows, dtype=np.int32), np.full(num_rows, -1, dtype=np.int32)
        lens[: len(requests)] = self._physical_lens(requests)
        slots[: len(requests)] = self._write_slots(requests)
        self._lens[slots[: len(requests)]] = lens[: len(requests)]
        self.gather(
            self._slots,
            to_device(slots, self._device),
            to_device(self._lens, self._device),
            self.block_table,
            self.physical_lens,
            self._page_tokens,
        )
        return BatchRows(
            self.block_table[:num_rows],
            self.physical_lens[:num_rows],
            torch.from_numpy(lens),
            max(len(request.pages) for request in requests),
        )

    def table_of(self, requests: Sequence[ResidentRequest]) -> tuple[torch.Tensor, np.ndarray]:
        """Of any live requests: int32 ``[requests, most pages]`` block ids, int32 ``[requests]`` tokens in them."""
        slots = to_device(self._write_slots(requests), self._device)
        width = max(len(request.pages) for request in requests)
        return self._slots[:, :width].index_select(0, slots), self._physical_lens(requests)

    def _physical_lens(self, requests: Sequence[ResidentRequest]) -> np.ndarray:
        lens = [request.num_tokens - request.num_holes * self._page_tokens for request in requests]
        return np.array(lens, dtype=np.int32)

    def _write_slots(self, requests: Sequence[ResidentRequest]) -> np.ndarray:
        """Bring the slots of ``requests`` up to date; int32 ``[len(requests)]``, which they are."""
        slots = np.empty(len(requests), dtype=np.int32)
        changed: list[tuple[int, np.ndarray]] = []
        for row, request in enumerate(requests):
            slot = self._slot_of.get(request.life)
            if slot is None:
                slot = self._slot_of[request.life] = self._free_slots.pop()
            if self._written[slot] is not request.block_ids:
                self._written[slot] = request.block_ids
                changed.append((slot, request.block_ids))
            slots[row] = slot
        if changed:
            written = np.array([slot for slot, _ in changed], dtype=np.int64)
            # As wide as what is there, and as what was there before and goes.
            width = max(max(len(block_ids), self._num_written[slot]) for slot, block_ids in changed)
            new = np.zeros((len(changed), width), dtype=np.int32)
            for row, (slot, block_ids) in enumerate(changed):
                new[row, : len(block_ids)] = block_ids
                self._num_written[slot] = len(block_ids)
            self._slots[:, :width].index_copy_(0, to_device(written, self._device), to_device(new, self._device))
        return slots
