"""No sample twice, none skipped: over several kills, at the second resume, at the ends of epochs, with every policy."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import reading_lives
from policy_mixtures import MIXTURES, POLICIES
from reading_lives import SAMPLES, STEPS

from incremental_ckpt import Repository, SaveError, SaveHandle
from incremental_ckpt.policy import BusyPolicy, KindPolicy
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import Crash, CrashStore, FaultStore, Op, Perform
from incremental_ckpt.testing.stores import WRITES

TIMEOUT = 120.0
LONG = 90  # steps: adaptive policies look at costs for a while first
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
        return final_steps(json.loads(line) for line in (self._folder / "log").read_text().splitlines())


def final_steps(log: Iterable[Sequence[Any]]) -> tuple[list[list[Any]], list[int]]:
    """What the final state consists of, [epoch, ids, drawn] for each step; and the steps of the resumes."""
    steps: list[list[Any]] = []
    resumes = []
    for what, step, *rest in log:
        if what == "resumed":
            resumes.append(step)
            assert step <= len(steps)
            del steps[step:]  # trained in vain
        else:
            assert step == len(steps) + 1
            steps.append(rest)
    return steps, resumes


def assert_each_once_per_epoch(steps: Sequence[Sequence[Any]]) -> None:
    ids = [n for _, ids, _ in steps for n in ids]
    assert len(ids) > 3 * SAMPLES
    for epoch in range(len(ids) // SAMPLES):
        assert sorted(ids[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))


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
    assert_each_once_per_epoch(expected)
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


class Lives:
    """Lives in one process, on a clock of their own, that end when their store crashes."""

    def __init__(self, name: str, data: Path, ahead: bool, choices: random.Random) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.store = MemoryStore()
        self._reader = (name, data, ahead)
        self._choices = choices
        self._clock = 0.0

    def live(self, policies: dict[str, Any], *, until: int, crash_write: int = 0) -> bool:
        """Until the middle of a step, or until a write before; 0: none. Returns whether it crashed."""
        crashing = CrashStore(self.store, crash_write, landed=self._choices.random() < 0.5)

        def within(step: int) -> None:
            self._clock += 0.1
            crashing.crashed |= step == until
            if crashing.crashed:
                raise Crash(f"in step {step}")

        handles: list[SaveHandle] = []

        def saving(handle: SaveHandle) -> None:
            handles.append(handle)
            if len(handles) == 1 or self._choices.random() < 0.5:  # else training goes on beside it
                with suppress(SaveError):
                    handle.wait(TIMEOUT)

        name, data, ahead = self._reader
        with suppress(Crash, SaveError):
            reading_lives.train(
                reading_lives.reader_of(name, data, ahead=ahead), FaultStore(crashing, self._take_time),
                {**policies, "clock": lambda: self._clock}, lambda *line: self.log.append(line), within, saving,
                seed=self._choices.randint(1, 1000) if self.log else 0, steps=LONG,
            )  # fmt: skip
        return crashing.crashed

    def _take_time(self, op: Op, perform: Perform) -> Any:
        if op.kind in WRITES:
            self._clock += 0.04
        return perform(op)


@pytest.mark.parametrize(
    ("name", "ahead", "when", "kind", "busy"),
    [(("0", "criteo")[number % 2], number % 3 == 0, *mixture) for number, mixture in enumerate(MIXTURES)],
    ids=["-".join(mixture) for mixture in MIXTURES],
)
def test_with_every_policy_each_sample_is_trained_once_per_epoch_and_in_order_over_four_crashes(
    name: str, ahead: bool, when: str, kind: KindPolicy, busy: BusyPolicy, data: Path
) -> None:
    policies = {"when": POLICIES[when], "kind": kind, "busy": busy}
    choices = random.Random(f"{when} {kind} {busy}")
    uninterrupted = Lives(name, data, ahead, choices)
    assert not uninterrupted.live({}, until=0)
    expected, _ = final_steps(uninterrupted.log)
    assert_each_once_per_epoch(expected)

    lives = Lives(name, data, ahead, choices)
    for until in (30, 45, 60, 75):
        assert lives.live(policies, until=until, crash_write=choices.randint(20, 40))
    assert not lives.live(policies, until=0)
    trained, resumes = final_steps(lives.log)
    assert trained == expected
    assert len(resumes) == 5
    assert min(resumes[1:]) > 0
    assert Repository(lives.store).check(deep=True).ok
