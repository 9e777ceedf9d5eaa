"""What a run of a benchmark is asked for, and what all its measures share.

It must not know any measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rows import Row
from saving import Saves
from workload import Training


@dataclass(frozen=True)
class Plan:
    """One training, measured in several ways one after another.

    Attributes:
        folder: an empty one on the disk to be measured.
        repeats: rounds of every measure, at most.
        seconds: the least length of a window in which speed is taken.
        budget: seconds after which a measure begins no further round.
    """

    training: Training
    folder: Path
    repeats: int
    seconds: float
    budget: float

    def saves(self, name: str) -> Saves:
        return Saves(self.training, self.folder / name)


Measure = Callable[[Plan], Sequence[Row]]


@dataclass(frozen=True)
class Matrix:
    """Sizes along which the same things are measured; each measure makes the trainings that it needs.

    Attributes:
        rows: of all tables, about.
        shares: of the rows that change in an interval.
        kinds_rows, intervals, codecs: of the trainings whose bytes are compared by kind, and how many intervals they
            have.
        growth_rows, changed: sizes of models, about, and the rows that change in each of them.
        ranks_rows, ranks: of the model that is sharded, and over how many processes.
        folder, repeats, budget: as of a Plan.
        low_priority: False: the background is not last in line for a core, for tests on a busy machine.
    """

    rows: int
    dim: int
    batch: int
    threads: int
    shares: tuple[float, ...]
    kinds_rows: int
    intervals: int
    codecs: tuple[str, ...]
    growth_rows: tuple[int, ...]
    changed: int
    ranks_rows: int
    ranks: tuple[int, ...]
    folder: Path
    repeats: int
    budget: float
    low_priority: bool

    def saves(self, training: Training, name: str) -> Saves:
        return Saves(training, self.folder / name, low_priority=self.low_priority)

    def training(self, rows: int, share: float) -> Training:
        return Training(rows=rows, dim=self.dim, batch=self.batch, share=share)
