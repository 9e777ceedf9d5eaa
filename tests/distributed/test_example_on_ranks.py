"""The example on two processes: killed hard it resumes with equal digests; its sharding may change on the way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dlrm_criteo
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

        self._store = folder / "store"
        self._output = folder / "output"

    def digest(self, sharding: str, steps: int, *, store: bool = True, world_size: int = 2) -> str:
        work = self._work(sharding, steps, store=store)
        assert self._ranks.run(world_size, *work) == [0] * world_size
        return self._output.with_suffix(".0").read_text().splitlines()[-1].removeprefix("digest ")

    def is_killed(self, sharding: str, steps: int, checkpoints: int, victim: int) -> bool:
        """All ranks die by SIGKILL, one a moment before the other, once there are so many checkpoints; False where they
        had finished."""
        with self._ranks.started(2, *self._work(sharding, steps)) as group:
            deadline = time.monotonic() + 60
            while len(list(self._store.glob("manifests/*.json"))) < checkpoints and time.monotonic() < deadline:
                time.sleep(0.004)
            finished = group.finished()
            group.kill(victim)
            return not finished

    def _work(self, sharding: str, steps: int, *, store: bool = True) -> Sequence[Any]:
        arguments = ["--data", str(self._data), "--steps", str(steps), "--save-every", "4", "--batch-size", "32"]
        arguments += ["--embedding-dim", "8", "--max-rows-per-table", "2000", "--sharding", sharding]
        arguments += ["--store", str(self._store)] if store else []
        return ("rank_lives.run_example", arguments, self._output)


@pytest.mark.parametrize(
    ("sharding", "victim"), [(sharding, number % 2) for number, sharding in enumerate(dlrm_criteo.SHARDINGS)]
)
def test_a_run_killed_hard_ends_with_the_digest_of_one_that_never_stopped(
    ranks: Ranks, tmp_path: Path, sharding: str, victim: int
) -> None:
    example = Example(ranks, tmp_path)
    uninterrupted = example.digest(sharding, 18, store=False)
    assert example.is_killed(sharding, 18, checkpoints=2, victim=victim)
    assert example.digest(sharding, 18) == uninterrupted


def test_a_digest_does_not_depend_on_the_sharding(ranks: Ranks, tmp_path: Path) -> None:
    example = Example(ranks, tmp_path)
    trained = example.digest("table-wise", 4)
    for sharding in ("row-wise", "data-parallel", "table-row-wise"):
        assert example.digest(sharding, 4) == trained  # resumes at the last step, and trains no more
    assert example.digest("planner", 4, world_size=1) == trained
    assert example.digest("row-wise", 6) != trained
