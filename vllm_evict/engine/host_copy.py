"""A device tensor on its way to the host, without holding up the device or the host."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch


class Arriving(Protocol):
    """Values on their way to the host."""

    def array(self) -> np.ndarray:
        """The values, once they have arrived."""


class HostCopy:
    """Starts copying when made; ``array()`` waits.

    Args:
        tensor: where it lies decides: on the host nothing is copied. On a GPU the copy is queued behind the work that
            fills the tensor, into pinned memory, with an event to wait for.

    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)
            self._event.record()

    def array(self) -> np.ndarray:
        """The values, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """``array`` on ``device``, without waiting for the copy (torch keeps its pinned source until it is done)."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
