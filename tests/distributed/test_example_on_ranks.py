"""The example on two processes: it resumes with equal digests, and with another sharding from one start to the next."""

from __future__ import annotations

from pathlib import Path

import pytest
import synthetic
from rank_processes import Ranks


class Example:
    """One training run of the example, of any number of lives."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks = ranks
        self._folder = folder
        self._data = folder / "train.txt"
        synthetic.write_file(self._data, 1_000, seed=3)

    def digest(self, sharding: str, steps: int, *, store: bool = True, world_size: int = 2) -> str:
        arguments = ["--data", str(self._data), "--steps", str(steps), "--save-every", "4", "--batch-size", "32"]
        arguments += ["--embedding-dim", "8", "--max-rows-per-table", "2000", "--sharding", sharding]
        arguments += ["--store", str(self._folder / "store")] if store else []
        output = self._folder / "output"
        assert self._ranks.run(world_size, "rank_lives.run_example", arguments, output) == [0] * world_size
        return output.with_suffix(".0").read_text().splitlines()[-1].removeprefix("digest ")


@pytest.mark.parametrize("sharding", ["planner", "mixed"])
def test_an_interrupted_run_ends_with_the_digest_of_one_that_never_stopped(
    ranks: Ranks, tmp_path: Path, sharding: str
) -> None:
    example = Example(ranks, tmp_path)
    uninterrupted = example.digest(sharding, 10, store=False)
    example.digest(sharding, 6)
    assert example.digest(sharding, 10) == uninterrupted


def test_a_digest_does_not_depend_on_the_sharding(ranks: Ranks, tmp_path: Path) -> None:
    example = Example(ranks, tmp_path)
    trained = example.digest("table-wise", 4)
    for sharding in ("row-wise", "data-parallel", "table-row-wise"):
        assert example.digest(sharding, 4) == trained  # resumes at the last step, and trains no more
    assert example.digest("planner", 4, world_size=1) == trained
    assert example.digest("row-wise", 6) != trained
