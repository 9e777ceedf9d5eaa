"""What follows from the runs of accuracy results: changes paired by seed, their standard errors, the verdict on each
width.

It must not know how runs are made, nor pages.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ALLOWED_PERCENT = 0.01
WIDTHS = ("int2", "int3", "int4", "int8")
PUBLISHED = {1: "int2", 3: "int3", 10: "int4", 20: "int4"}
"""By restores: the width that Check-N-Run (NSDI'22) gives a run that expects so many."""


@dataclass(frozen=True)
class Mean:
    """Of one value per seed. ``error``: its standard error; None of a single one."""

    mean: float
    error: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        return cls(statistics.fmean(values), error, len(values))

    @property
    def deviation(self) -> float:
        """Between seeds."""
        return 0.0 if self.error is None else self.error * self.count**0.5

    @property
    def worst(self) -> float | None:
        """Two standard errors above the mean."""
        return None if self.error is None else self.mean + 2 * self.error

    @property
    def fails(self) -> bool:
        """Worse than allowed by more than two standard errors."""
        return self.error is not None and self.mean - 2 * self.error > ALLOWED_PERCENT


@dataclass(frozen=True)
class Change:
    """How much worse runs with restores are than the uninterrupted runs of the same seeds, in percent of those: the
    loss by which it is higher, the AUC by which it is lower."""

    loss: Mean
    auc: Mean

    @property
    def fails(self) -> bool:
        return self.loss.fails or self.auc.fails


class Result:
    """The runs of one data set.

    Attributes:
        codecs: in the order in which they were asked for.
        restores: ascending, without 0.
    """

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.conditions: Mapping[str, Any] = result["conditions"]
        self.machine: Mapping[str, Any] = result["machine"]
        self._runs = {(r["codec"], r["restores"], r["seed"]): r for r in result["runs"]}
        self.codecs = list(dict.fromkeys(codec for codec, _, _ in sorted(self._runs, key=_place) if codec))
        self.restores = sorted({restores for _, restores, _ in self._runs} - {0})

    def runs(self, codec: str | None, restores: int) -> dict[int, Mapping[str, Any]]:
        """By seed."""
        found = {seed: run for (c, r, seed), run in self._runs.items() if (c, r) == (codec, restores)}
        return dict(sorted(found.items()))

    @property
    def uninterrupted(self) -> dict[int, Mapping[str, Any]]:
        return self.runs(None, 0)

    def change(self, codec: str, restores: int) -> Change | None:
        """None where nothing was run."""
        pairs = [(self.uninterrupted[seed], run) for seed, run in self.runs(codec, restores).items()]
        if not pairs:
            return None
        return Change(
            Mean.of([100 * (run["loss"] / alone["loss"] - 1) for alone, run in pairs]),
            Mean.of([100 * (1 - run["auc"] / alone["auc"]) for alone, run in pairs]),
        )

    def spread(self, figure: str) -> float:
        """Between the uninterrupted runs of different seeds: their standard deviation, in percent of the mean."""
        values = [run[figure] for run in self.uninterrupted.values()]
        return 100 * statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else 0.0

    def identical(self, codec: str, restores: int) -> tuple[int, int]:
        """Of how many runs each table, optimizer state and dense parameter ends with the bits of the uninterrupted
        run, and how many runs there are."""
        runs = self.runs(codec, restores)
        return sum(self.uninterrupted[seed]["digest"] == run["digest"] for seed, run in runs.items()), len(runs)

    def error(self, codec: str, kind: str) -> tuple[float, float] | None:
        """Mean L2 norm of what a row is off by after the first restore of a run, and that as a share of a row's mean L2
        norm. Of the runs with the fewest restores: there most rows have been trained by then."""
        fewest = next((r for r in self.restores if self.runs(codec, r)), 0)
        found = [run["error"][kind] for run in self.runs(codec, fewest).values() if kind in run["error"]]
        if not found:
            return None
        off, norm = (statistics.fmean([e[name] for e in found]) for name in ("off", "norm"))
        return off, off / norm

    def bytes_to_raw(self, codec: str, restores: int) -> float | None:
        """What all checkpoints of a run take, as a share of what they take in ``raw``."""
        raw = self.runs("raw", restores)
        shares = [run["bytes"] / raw[seed]["bytes"] for seed, run in self.runs(codec, restores).items() if seed in raw]
        return statistics.fmean(shares) if shares else None


def judged(results: Collection[Result]) -> dict[tuple[int, str], bool | None]:
    """By restores and width, whether it serves: from the published width on, up to the first that fails in no data set.
    None where nothing was run."""
    verdicts: dict[tuple[int, str], bool | None] = {}
    for restores, published in PUBLISHED.items():
        for width in WIDTHS[WIDTHS.index(published) :]:
            changes = [c for result in results if (c := result.change(width, restores)) is not None]
            verdicts[restores, width] = not any(change.fails for change in changes) if changes else None
            if verdicts[restores, width]:
                break
    return verdicts


def _place(run: tuple[str | None, int, int]) -> int:
    order = ("raw", "fp16", "bf16", "int8", "int4", "int3", "int2")
    return order.index(run[0]) if run[0] in order else -1
