"""Page mass of steps in which every request decodes one token, in tensors that a CUDA graph may hold on to.

A full graph replays the kernels of its capture: as many queries, the same addresses. So every row of the batch is
listed as observed, at a place of its own; one that is not sees 0 tokens, and in a step that observes nobody a flag on
the device makes the kernels return at once. Whether a step is replayed or run is vLLM's to decide, later: the same
tensors serve both.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_evict.engine.host_copy import to_device
from vllm_evict.engine.mass_request import DeviceQueries, MassRequest, Stopwatch
from vllm_evict.engine.rows import BatchRows


class DecodeMass:
    """One per worker. All changes are queued on the current stream, so a step still running has its own.

    Args:
        max_rows: most requests of a batch.
        max_pages: most pages a request can hold.
        device: of the tensors.

    """

    def __init__(self, max_rows: int, max_pages: int, device: torch.device) -> None:
        self._each_row = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._visible_tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._page_mass = torch.zeros(max_rows, max_pages, dtype=torch.float32, device=device)
        self._enabled = torch.zeros(1, dtype=torch.int32, device=device)
        self._device = device

    def observe(
        self,
        row: np.ndarray,
        visible_tokens: np.ndarray,
        rows: BatchRows,
        layer_weight: float,
        stopwatch: Stopwatch,
    ) -> MassRequest:
        """Observe some rows of this step.

        Args:
            row: int32 ``[observed]`` which.
            visible_tokens: int32 ``[observed]`` resident tokens that each sees, itself included.
            rows: of the step.
            layer_weight: as in ``MassRequest``.
            stopwatch: as in ``MassRequest``.

        """
        visible = np.zeros(len(self._visible_tokens), dtype=np.int32)
        visible[row] = visible_tokens
        self._visible_tokens.copy_(to_device(visible, self._device))
        page_mass = self._page_mass[: len(rows.block_table), : rows.max_pages]
        page_mass.zero_()
        self._enabled.fill_(1)
        return self._request(
            rows.block_table[:, : rows.max_pages],
            page_mass,
            layer_weight,
            stopwatch,
            chosen=to_device(row.astype(np.int64), self._device),
        )

    def skip(self) -> None:
        """Observe nobody in this step."""
        self._enabled.zero_()

    def for_capture(
        self, num_rows: int, block_table: torch.Tensor, layer_weight: float, stopwatch: Stopwatch
    ) -> MassRequest:
        """What a graph of ``num_rows`` rows is captured with: rows as wide as they can become."""
        return self._request(block_table[:num_rows], self._page_mass[:num_rows], layer_weight, stopwatch)

    def _request(
        self,
        block_table: torch.Tensor,
        page_mass: torch.Tensor,
        layer_weight: float,
        stopwatch: Stopwatch,
        chosen: torch.Tensor | None = None,
    ) -> MassRequest:
        num_rows = len(block_table)
        each_row = self._each_row[:num_rows]
        return MassRequest(
            DeviceQueries(token=each_row, row=each_row, visible_tokens=self._visible_tokens[:num_rows]),
            block_table,
            page_mass,
            layer_weight,
            stopwatch,
            self._enabled,
            chosen,
        )
