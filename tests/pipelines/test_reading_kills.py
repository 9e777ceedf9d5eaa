"""No sample twice, none skipped: over several hard kills, at the second resume and at the ends of epochs."""

from __future__ import annotations

import json
import random
import signal
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import reading_lives
from reading_lives import SAMPLES, STEPS

TIMEOUT = 120.0
HERE = Path(__file__).parent


class Run:
    """One run, of any number of lives."""

    def __init__(self, forks: ForkServerContext, folder: Path, data: Path, name: str, ahead: bool) -> None:
        folder.mkdir()
        self._forks = forks
        self._folder = folder
        self._arguments = (folder, data, name, ahead)

    def live(self, *kill: Any) -> int:
        process = self._forks.Process(target=reading_lives.live, args=(*self._arguments, *kill))
        process.start()
        process.join(TIMEOUT)
        assert process.exitcode in (0, -signal.SIGKILL), (self._folder / "errors").read_text()
        return process.exitcode

    def log(self) -> tuple[list[list[Any]], list[int]]:
        """What the final state consists of, [epoch, ids, drawn] for each step; and the steps of the resumes."""
        steps: list[list[Any]] = []
        resumes = []
        for line in (self._folder / "log").read_text().splitlines():
            what, step, *rest = json.loads(line)
            if what == "resumed":
                resumes.append(step)
                assert step <= len(steps)
                del steps[step:]  # trained in vain
            else:
                assert step == len(steps) + 1
                steps.append(rest)
        return steps, resumes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that are numbered in their first categorical column."""
    rows = ["\t".join(["1", *["3"] * 13, f"{n:08x}", *["0000000a"] * 25]) for n in range(SAMPLES)]
    path = tmp_path_factory.mktemp("data") / "train.txt"
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
@pytest.mark.parametrize("name", ["0", "2", "criteo"], ids=["torchdata", "torchdata-2-workers", "criteo"])
def test_every_sample_is_trained_once_per_epoch_and_in_order_however_often_the_run_is_killed(
    forks: ForkServerContext, tmp_path: Path, data: Path, name: str, ahead: bool
) -> None:
    uninterrupted = Run(forks, tmp_path / "uninterrupted", data, name, ahead)
    assert uninterrupted.live() == 0
    expected, resumes = uninterrupted.log()
    assert resumes == [0]
    ids = [n for _, ids, _ in expected for n in ids]
    for epoch in range(3):
        assert sorted(ids[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    if name != "criteo":  # the example's reader has batches across the ends of epochs
        assert [epoch for epoch, _, _ in expected] == [step // 10 for step in range(STEPS)]

    rng = random.Random(f"{name} {ahead}")
    run = Run(forks, tmp_path / "killed", data, name, ahead)
    # In the step after the end of an epoch, whose checkpoint is resumed; twice in the middle of a save; and somewhere.
    for kill in [(11, 0), (0, rng.randint(3, 12)), (0, rng.randint(3, 12)), (rng.randint(30, 33), 0)]:
        assert run.live(*kill, rng.random() < 0.5) == -signal.SIGKILL
    assert run.live() == 0
    trained, resumes = run.log()
    assert len(resumes) == 5
    assert min(resumes[1:]) >= 8
    assert trained == expected
