"""Read the file that `--kv-eviction-trace` writes: one JSON line per eviction."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.oracle.rebased import Rebase
from tests.oracle.visibility import Eviction


@dataclass(frozen=True)
class TraceLine:
    """One eviction of one request.

    `epoch` counts the request's preemptions: each starts from an empty cache, and recomputes.
    `resident` are the logical pages held before this eviction, ascending; `scores` are theirs in
    the same order, one tuple for each signal that the policy needs, NaN (in the file: null or NaN) for a
    page that nobody has judged yet. `pages` are the resident pages that became holes.
    """

    request: str
    epoch: int
    num_computed_tokens: int
    pages: tuple[int, ...]
    resident: tuple[int, ...]
    scores: Mapping[str, tuple[float, ...]]
    reason: str

    def validate(self) -> None:
        if list(self.resident) != sorted(set(self.resident)):
            raise ValueError(f"resident pages are not ascending: {self}")
        if not self.pages or not set(self.pages) <= set(self.resident):
            raise ValueError(f"evicted pages are not among the resident ones: {self}")
        for signal, scores in self.scores.items():
            if len(scores) != len(self.resident):
                raise ValueError(f"{len(scores)} scores of {signal} for {len(self.resident)} resident pages: {self}")

    def score_of(self, signal: str = "attention") -> dict[int, float]:
        """Score per resident logical page."""
        if signal not in self.scores:
            raise ValueError(f"no scores of {signal} in this line: {self}")
        return dict(zip(self.resident, self.scores[signal], strict=True))


def _line(text: str) -> TraceLine:
    fields = json.loads(text)
    line = TraceLine(
        request=fields["request"],
        epoch=fields["epoch"],
        num_computed_tokens=fields["num_computed_tokens"],
        pages=tuple(fields["pages"]),
        resident=tuple(fields["resident"]),
        scores={
            signal: tuple(math.nan if score is None else score for score in values)
            for signal, values in fields["scores"].items()
        },
        reason=fields["reason"],
    )
    line.validate()
    return line


def read_rebases(path: Path | str) -> dict[tuple[str, int], list[Rebase]]:
    """Return the rebases of each request and epoch as written, from the same file.

    Raises ValueError if the offset does not grow.
    """
    rebases: dict[tuple[str, int], list[Rebase]] = {}
    for text in Path(path).read_text().splitlines():
        fields = json.loads(text)
        if _is_rebase(fields):
            rebase = Rebase(fields["num_computed_tokens"], fields["offset"], tuple(fields["resident"]))
            before = rebases.setdefault((fields["request"], fields["epoch"]), [])
            if before and before[-1].offset >= rebase.offset:
                raise ValueError(f"the offset does not grow: {before[-1]} then {rebase}")
            before.append(rebase)
    return rebases


def _is_rebase(fields: Mapping[str, object]) -> bool:
    return "offset" in fields


def read_trace(path: Path | str, request_id: str | None = None) -> dict[str, list[TraceLine]]:
    """Return the lines of each request as written; with `request_id`, of that one alone (maybe none).

    Raises ValueError if a page is evicted that the lines before it had already evicted, or time
    runs backwards.
    """
    lines_of: dict[str, list[TraceLine]] = {} if request_id is None else {request_id: []}
    for text in Path(path).read_text().splitlines():
        if _is_rebase(json.loads(text)):
            continue
        line = _line(text)
        if request_id is None or line.request == request_id:
            lines_of.setdefault(line.request, []).append(line)
    for lines in lines_of.values():
        _validate_history(lines)
    return lines_of


def _validate_history(lines: list[TraceLine]) -> None:
    gone: set[int] = set()  # of this epoch
    for before, after in zip([None, *lines], lines, strict=False):
        if before is not None:
            if (before.epoch, before.num_computed_tokens) > (after.epoch, after.num_computed_tokens):
                raise ValueError(f"time runs backwards: {before} then {after}")
            if after.epoch != before.epoch:
                gone = set()
        if back := gone & set(after.resident):
            raise ValueError(f"pages {sorted(back)} were evicted before, but are resident again: {after}")
        gone |= set(after.pages)


def evictions_of(lines: Iterable[TraceLine], epoch: int = 0) -> tuple[Eviction, ...]:
    """Return the eviction schedule of one epoch of one request."""
    return tuple(Eviction(line.num_computed_tokens, line.pages) for line in lines if line.epoch == epoch)
