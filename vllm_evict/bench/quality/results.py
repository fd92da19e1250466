"""What is measured, and how it is looked up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """One method on one case.

    Args:
        method: its name.
        page_tokens: 0 = token by token.
        budget_tokens: resident tokens; 0 = all (the full cache itself).
        context: number of the stretch.
        place: where the passage stood that was read again; -1 = plain text.
        window_has: whether a window of the budget still held the passage; None = some of it, or plain text.
        kl: nats, mean over positions of KL(full cache, method).
        agreement: share of positions whose first choice is the full cache's.
        loss: nats, mean cross entropy of the text's next token.
        accuracy: share of positions whose first choice is the text's next token.

    """

    method: str
    page_tokens: int
    budget_tokens: int
    context: int
    place: int
    window_has: bool | None
    kl: float
    agreement: float
    loss: float
    accuracy: float


Cases = dict[tuple[int, int], float]
"""A number per (stretch, place)."""


class Results:
    """Everything measured, by method, page size and budget."""

    def __init__(self, measured: Iterable[Measured]) -> None:
        self._measured = list(measured)

    @property
    def settings(self) -> list[tuple[int, int]]:
        """(budget, page) in tokens, larger budgets first; without the full cache and the token-level reference."""
        found = {(m.budget_tokens, m.page_tokens) for m in self._measured if m.page_tokens}
        return sorted(found, key=lambda setting: (-setting[0], setting[1]))

    def methods(self, budget_tokens: int, page_tokens: int) -> list[str]:
        """Their names, those that recall best first."""
        names = {m.method for m in self._measured if (m.budget_tokens, m.page_tokens) == (budget_tokens, page_tokens)}
        return sorted(names, key=lambda name: mean(self.recall(name, budget_tokens, page_tokens, window_has=False)))

    def plain(self, method: str, budget_tokens: int, page_tokens: int, field: str = "kl") -> Cases:
        return self._cases(field, lambda m: m.place < 0 and _is(m, method, budget_tokens, page_tokens))

    def recall(
        self, method: str, budget_tokens: int, page_tokens: int, *, window_has: bool | None = None, field: str = "kl"
    ) -> Cases:
        """Of passages that a window of the budget still has, or has left; by default of all, wherever they stood."""
        return self._cases(
            field,
            lambda m: (
                m.place >= 0
                and (window_has is None or m.window_has is window_has)
                and _is(m, method, budget_tokens, page_tokens)
            ),
        )

    def full_loss(self) -> tuple[float, float]:
        """The full cache's own loss in nats: on plain text, and on passages read again."""
        plain = self._cases("loss", lambda m: m.method == "full cache" and m.place < 0)
        again = self._cases("loss", lambda m: m.method == "full cache" and m.place >= 0)
        return mean(plain), mean(again)

    def _cases(self, field: str, wanted: Callable[[Measured], bool]) -> Cases:
        return {(m.context, m.place): getattr(m, field) for m in self._measured if wanted(m)}


def _is(m: Measured, method: str, budget_tokens: int, page_tokens: int) -> bool:
    return (m.method, m.budget_tokens, m.page_tokens) == (method, budget_tokens, page_tokens)


def mean(cases: Cases) -> float:
    """Over all cases; NaN if there are none."""
    return sum(cases.values()) / len(cases) if cases else math.nan
