"""The promise itself: a run killed hard at random moments and resumed each time ends as if it had never stopped."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import synthetic

STEPS = 40


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.txt"
    synthetic.write_file(path, 2_000, seed=3)
    return path


def live(arguments: list[str], output: Path) -> None:
    import dlrm_criteo

    with output.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
        sys.exit(dlrm_criteo.main(arguments))


class Run:
    """One training run, of any number of lives."""

    def __init__(self, forks: ForkServerContext, folder: Path, data: Path, *, store: bool, kind: str = "intermittent"):
        self.store = folder / "store"
        self._forks = forks
        self._output = folder / "output"
        self._arguments = ["--data", str(data), "--steps", str(STEPS), "--save-every", "4", "--batch-size", "64"]
        self._arguments += ["--embedding-dim", "8", "--max-rows-per-table", "20000", "--kind", kind]
        self._arguments += ["--store", str(self.store)] if store else []

    def finish(self) -> str:
        """Returns the digest."""
        process = self._begin()
        process.join()
        text = self._output.read_text()
        assert process.exitcode == 0, text
        return text.splitlines()[-1].removeprefix("digest ")

    def kill(self, *, objects: int, manifests: int, seconds: float) -> bool:
        """Kill so long after the store holds that many; False if the process had finished before."""
        process = self._begin()
        while process.is_alive() and (self.objects() < objects or self.manifests() < manifests):
            time.sleep(0.004)
        process.join(seconds)
        process.kill()
        process.join()
        assert process.exitcode in (0, -9), self._output.read_text()
        return process.exitcode == -9

    def objects(self) -> int:
        return sum(1 for path in self.store.rglob("*") if path.is_file())

    def manifests(self) -> int:
        return sum(1 for _ in self.store.glob("manifests/*.json"))

    def _begin(self) -> multiprocessing.context.ForkServerProcess:
        process = self._forks.Process(target=live, args=(self._arguments, self._output))
        process.start()
        return process


@pytest.fixture(scope="module")
def uninterrupted(forks: ForkServerContext, data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return Run(forks, tmp_path_factory.mktemp("uninterrupted"), data, store=False).finish()


def test_saving_does_not_change_what_is_trained(
    forks: ForkServerContext, data: Path, tmp_path: Path, uninterrupted: str
) -> None:
    assert Run(forks, tmp_path, data, store=True).finish() == uninterrupted


@pytest.mark.parametrize(("kind", "seed"), [("intermittent", 1), ("consecutive", 2), ("one-shot", 3), ("full", 4)])
def test_a_run_killed_at_random_moments_ends_like_one_that_never_stopped(
    forks: ForkServerContext, data: Path, tmp_path: Path, uninterrupted: str, kind: str, seed: int
) -> None:
    rng = random.Random(seed)
    run = Run(forks, tmp_path, data, store=True, kind=kind)
    for checkpoints in (0, 1):
        # Soon after a new object, which is often in the middle of a save: that is where it would hurt.
        objects = run.objects() + rng.randint(1, 14)
        assert run.kill(objects=objects, manifests=checkpoints, seconds=rng.uniform(0, 0.03))
    assert run.finish() == uninterrupted


def test_a_finished_run_started_again_only_tells_its_digest(
    forks: ForkServerContext, data: Path, tmp_path: Path, uninterrupted: str
) -> None:
    run = Run(forks, tmp_path, data, store=True)
    run.finish()
    manifests = run.manifests()
    assert run.finish() == uninterrupted
    assert run.manifests() == manifests
