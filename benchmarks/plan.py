"""What one run of the benchmark is asked for, and what all its measures share.

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
