"""The rows of a result: one ratio each, with its spread and its target.

It must not know how anything was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Target:
    """What the ratio shall be: at most or at least ``value``."""

    bound: Literal["at most", "at least"]
    value: float

    def reached_by(self, ratio: float) -> bool:
        return ratio <= self.value if self.bound == "at most" else ratio >= self.value


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        ratio: the median over the repeats of ``what``, a quotient of two things measured in the same run.
        quartiles: the lower and the upper one.
        details: the parts of the quotient and what else is worth knowing; seconds, bytes and counts by their names.
    """

    measure: str
    what: str
    ratio: float
    quartiles: tuple[float, float]
    repeats: int
    target: Target | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        return None if self.target is None else self.target.reached_by(self.ratio)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "reached": self.reached}


def ratio_row(
    measure: str,
    what: str,
    pairs: Sequence[tuple[float, float]],
    target: Target | None = None,
    **details: Any,
) -> Row:
    """A row of the quotients of pairs, each pair measured side by side."""
    ratios = [numerator / denominator for numerator, denominator in pairs]
    low, middle, high = quartiles(ratios)
    return Row(measure, what, middle, (low, high), len(ratios), target, details)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
