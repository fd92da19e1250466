"""Means with their uncertainty. Passages of one stretch of text share evictions, so whole stretches are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

DRAWS = 4000


class Interval(NamedTuple):
    """A mean and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def below_zero(self) -> bool:
        return self.high < 0


def interval(values: Mapping[tuple[int, int], float]) -> Interval:
    """Of the mean of values keyed by (stretch, place in it)."""
    stretches = sorted({stretch for stretch, _ in values})
    sums = np.array([sum(v for (s, _), v in values.items() if s == stretch) for stretch in stretches])
    counts = np.array([sum(s == stretch for s, _ in values) for stretch in stretches])
    drawn = np.random.default_rng(0).integers(len(stretches), size=(DRAWS, len(stretches)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high))


def paired(values: Mapping[tuple[int, int], float], other: Mapping[tuple[int, int], float]) -> Interval:
    """Of the mean difference, case by case."""
    return interval({case: values[case] - other[case] for case in values})
