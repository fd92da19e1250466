"""What needs a process of its own, several at a time: engines under Triton's interpreter use one core each."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 1500


def run(module: str, folder: Path, items: Sequence[Any]) -> list[Any]:
    """`python -m module ITEMS RESULTS` on shares of `items`, both pickled lists; the results in the order of `items`.

    Raises:
        AssertionError: a child failed or took too long; with the end of its output.

    """
    num_children = min(len(os.sched_getaffinity(0)), len(items))
    end_time = time.monotonic() + LIMIT_SECONDS
    children = [_start(module, folder, share, items[share::num_children]) for share in range(num_children)]
    try:
        for share, child in enumerate(children):
            code = child.wait(max(1, end_time - time.monotonic()))
            assert code == 0, f"{module} ended with {code}:\n{_log(folder, share).read_text(errors='replace')[-4000:]}"
    finally:
        for child in children:
            child.kill()  # nothing, if it has ended
            child.wait()
    results: list[Any] = [None] * len(items)
    for share in range(num_children):
        results[share::num_children] = pickle.loads(_file(folder, share, "results").read_bytes())
    return results


def _start(module: str, folder: Path, share: int, items: Sequence[Any]) -> subprocess.Popen:
    _file(folder, share, "items").write_bytes(pickle.dumps(list(items)))
    command = [sys.executable, "-m", module, _file(folder, share, "items"), _file(folder, share, "results")]
    with _log(folder, share).open("w") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT
        )


def _file(folder: Path, share: int, name: str) -> Path:
    return folder / f"{name}-{share}"


def _log(folder: Path, share: int) -> Path:
    return _file(folder, share, "log")
