"""How large tables are and which rows an interval touches, as published of Criteo and fitted to it: a few rows in every
interval, most in hardly any.

It must not know models or checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import criteo

_HALVINGS = 50


def table_sizes(rows: int) -> list[int]:
    """The published cardinalities of Criteo Kaggle, cut off at the height at which they sum up to about ``rows``; where
    they are fewer than that, all as many times as large."""
    published = np.array([fit.cardinality for fit in criteo.column_fits()])
    if rows > published.sum():
        return [int(n) for n in published * (rows / published.sum())]
    low, high = 1, int(published.max())
    while low < high:
        cap = (low + high + 1) // 2
        low, high = (cap, high) if np.minimum(published, cap).sum() <= rows else (low, cap - 1)
    return [int(n) for n in np.minimum(published, low)]


class Popularity:
    """Samples of one row per table, independent of each other: of ``n`` samples a row of probability p is in at least
    one with 1 - (1 - p)^n.

    Args:
        sizes: rows of each table, in the order of Criteo's columns.
    """

    def __init__(self, sizes: Sequence[int], seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        fits = criteo.column_fits()
        # log(1 - p); a table of one row has p = 1.
        self._misses = [
            random.permutation(np.log1p(-np.minimum(_probabilities(fit, rows), 1 - 1e-12)))
            for fit, rows in zip(fits, sizes, strict=True)
        ]
        self._rows = sum(sizes)

    def samples_for(self, share: float) -> float:
        """How many samples touch this share of all rows, on average."""
        low, high = 0.0, 64.0
        for _ in range(_HALVINGS):
            if self._touched(high) >= share * self._rows:
                break
            high *= 4
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._touched(middle) >= share * self._rows else (middle, high)
            if high - low < 1e-3 * high:
                break
        return high

    def interval(self, samples: float, random: np.random.Generator) -> list[np.ndarray]:
        """The rows that one interval of so many samples touches, ascending int64 by table."""
        return [np.flatnonzero(random.random(m.size) < -np.expm1(samples * m)) for m in self._misses]

    def _touched(self, samples: float) -> float:
        return float(sum(-np.expm1(samples * m).sum() for m in self._misses))


def _probabilities(fit: criteo.ColumnFit, rows: int) -> np.ndarray:
    """Of ranks 1..rows: the first has its measured share, the others p(rank) ~ (rank + q)^-s."""
    if rows == 1:
        return np.ones(1)
    tail = (np.arange(2, rows + 1) + fit.q) ** -fit.s
    return np.concatenate(([fit.top1], tail * ((1 - fit.top1) / tail.sum())))
