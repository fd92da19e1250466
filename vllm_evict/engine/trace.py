"""The eviction trace: one JSON line per eviction, and per rebase (``--kv-eviction-trace FILE``)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np

from vllm_evict.config import EvictionConfigError, flag_name
from vllm_evict.pages import EvictionPlan, PageView


def check_writable(path: str) -> None:
    """Find out before the model loads.

    Raises:
        EvictionConfigError: the trace cannot be written to ``path``.

    """
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise EvictionConfigError(
            f"{flag_name('trace')} got {path!r}: cannot be written ({error.strerror}). Give a file in an existing, "
            "writable folder."
        ) from None


class EvictionTrace:
    """Appends to ``path``; each line is flushed, so a reader may follow it.

    Raises:
        OSError: the file cannot be written.

    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, request_id: str, epoch: int, view: PageView, plan: EvictionPlan, reason: str) -> None:
        """Record that ``plan`` was carried out on ``view``.

        Tokens at positions ``num_computed_tokens`` and up no longer see ``pages``.
        """
        line = {
            "request": request_id,
            "epoch": epoch,
            "num_computed_tokens": view.num_tokens,
            "pages": list(plan.pages),
            "reason": reason,
            "resident": view.pages.tolist(),
            "scores": {signal: _json_floats(values) for signal, values in view.signals.items()},
        }
        self._file.write(json.dumps(line) + "\n")

    def write_rebase(
        self, request_id: str, epoch: int, num_computed_tokens: int, offset: int, resident: Sequence[int]
    ) -> None:
        """Record that the i-th of the ``resident`` pages starts at rotary position i pages from now on.

        Tokens at positions ``num_computed_tokens`` and up have the rotary position that is ``offset`` lower.
        """
        line = {
            "request": request_id,
            "epoch": epoch,
            "num_computed_tokens": num_computed_tokens,
            "offset": offset,
            "resident": list(resident),
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _json_floats(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]
