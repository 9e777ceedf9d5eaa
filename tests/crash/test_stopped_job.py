"""A second job on the store of a job that is stopped or alive: one goes on, the other is told, the state is the
winner's."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
import torch
from small_runs import Run, assert_same, truth

from incremental_ckpt import Checkpointer, ConflictError, Repository
from incremental_ckpt.storage import LocalStore

PLACES = {
    "before its save": (None, ""),
    "before a pack": ("put", "data/*.safetensors"),
    "before its vote": ("put", "data/*/rank-00000.json"),
    "before its commit": ("put_if_absent", "manifests/*"),
}


class Job:
    """The other process: it holds in its second save, and is stopped there or left alive."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        command = [sys.executable, str(Path(__file__).parent / "held_job.py")]
        environ = {**os.environ, "PYTHONPATH": str(root)}
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=environ)
        assert self._answer() == "ready"

    def run_until_held(self, folder: Path, place: str) -> None:
        kind, key = PLACES[place]
        self._tell(json.dumps({"folder": str(folder), "kind": kind, "key": key}))
        assert self._answer() == "held"

    def stop(self) -> None:
        """Returns when the system says that it is stopped."""
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self) -> list[str]:
        self._tell("")
        self._process.send_signal(signal.SIGCONT)
        told: list[str] = json.loads(self._answer())
        return told

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.end()


@pytest.fixture(scope="module")
def states() -> list[dict[str, Any]]:
    return truth("adagrad", 3)


class Second:
    """A job of this process that resumes what the first one saved, and trains on other batches."""

    def __init__(self, folder: Path, states: list[dict[str, Any]]) -> None:
        self.run = Run(seed=7)
        self.checkpointer = Checkpointer(self.run.model, LocalStore(folder), **self.run.arguments)
        progress = self.checkpointer.resume_from_checkpoint()
        assert progress is not None
        assert progress.step == 1
        assert_same(self.run.copy(), states[1])
        torch.manual_seed(99)
        self.run.train(2)

    def save(self, step: int) -> None:
        self.checkpointer.save_checkpoint(step, kind="consecutive").wait()


def steps_in(folder: Path) -> list[int]:
    repository = Repository(LocalStore(folder))
    assert repository.check(deep=True).problems == ()
    return [one.step for one in repository.checkpoints()]


def resumed(folder: Path) -> Run:
    run = Run(seed=11)
    with Checkpointer(run.model, LocalStore(folder), **run.arguments) as checkpointer:
        assert checkpointer.resume_from_checkpoint() is not None
    return run


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "alive"])
@pytest.mark.parametrize("place", PLACES)
def test_a_job_that_was_held_while_a_second_one_committed_is_told_and_changes_nothing(
    job: Job, states: list[dict[str, Any]], tmp_path: Path, place: str, stopped: bool
) -> None:
    job.run_until_held(tmp_path, place)
    if stopped:
        job.stop()
    second = Second(tmp_path, states)
    second.save(13)
    assert job.go_on() == ["saved", "ConflictError", "ConflictError"]
    second.run.train()
    second.save(14)
    second.checkpointer.close()
    assert steps_in(tmp_path) == [1, 13, 14]
    assert_same(resumed(tmp_path).copy(), second.run.copy())


@pytest.mark.parametrize("place", ["before a pack", "before its commit"])
def test_a_job_that_was_stopped_and_commits_first_wins_and_the_second_one_is_told(
    job: Job, states: list[dict[str, Any]], tmp_path: Path, place: str
) -> None:
    job.run_until_held(tmp_path, place)
    job.stop()
    second = Second(tmp_path, states)
    assert job.go_on() == ["saved", "saved", "saved"]
    for _ in range(2):
        with pytest.raises(ConflictError, match="Stop this job"):
            second.save(13)
    second.checkpointer.close()
    assert steps_in(tmp_path) == [1, 2, 3]
    assert_same(resumed(tmp_path).copy(), states[3])
