"""What saving by ``Adaptive`` costs a training, and what a failure then costs, against dcp.save at the same budget.

It must not know how the interval is chosen.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from plan import Plan
from replay import Peer, warm
from rows import Row, Target, quartiles, ratio_row
from saving import BASE
from timing import rounds_of, seconds_of
from workload import Training

from incremental_ckpt import Adaptive, Checkpointer, ResumeEvent, SaveEvent
from incremental_ckpt.events import Event

_PEER_ROUNDS = 2


def measure_recovery(plan: Plan, max_overhead: float) -> list[Row]:
    """Windows of training with deltas at the pace that the policy finds, and windows without a checkpointer, in turn.

    The base that the chain begins with is written before the windows: the policy pays for each save with the interval
    behind it, so that a base lengthens one interval and no window would be long enough to hold it.
    """
    training = plan.training
    with _Paced(training, plan.folder / "paced", max_overhead) as paced:
        paced.begin()
        windows = rounds_of(
            lambda: (paced.window(plan.seconds), _bare(training, plan.seconds)), plan.repeats, plan.budget
        )
        intervals = [window.seconds / window.saves for window, _ in windows]
        interval = quartiles(intervals)[1]
        warm(plan.folder / "paced")
        resumes = [paced.resume() for _ in range(_PEER_ROUNDS)]
        chain = paced.chain_length
    peer, folder = Peer(training, plan.folder / "dcp"), plan.folder / "dcp"
    saves, loads = [], []
    for _ in range(min(_PEER_ROUNDS, plan.repeats)):
        saves.append(peer.save())
        warm(folder)
        loads.append(peer.load())
    shutil.rmtree(folder)
    ours = [interval / 2 + resume for resume in resumes[: len(saves)]]
    theirs = [save / max_overhead / 2 + load for save, load in zip(saves, loads, strict=True)]
    events = [event for window, _ in windows for event in window.events]
    return [
        ratio_row(
            "recovery",
            f"run time with Adaptive(max_overhead={max_overhead:g}) / without, deltas",
            [(window.seconds / window.steps, bare) for window, bare in windows],
            Target("at most", 1 + max_overhead),
            saves=sum(window.saves for window, _ in windows),
            interval_seconds=interval,
            step_seconds=quartiles([window.seconds / window.steps for window, _ in windows])[1],
            bare_step_seconds=quartiles([bare for _, bare in windows])[1],
            stall_seconds=quartiles([event.stall_seconds for event in events])[1],
            persist_seconds=quartiles([event.persist_seconds for event in events])[1],
            bytes_per_save=quartiles([float(event.bytes) for event in events])[1],
        ),
        ratio_row(
            "recovery",
            "expected recovery with dcp.save at the same budget / with Adaptive deltas",
            list(zip(theirs, ours, strict=True)),
            Target("at least", 10.0),
            interval_seconds=interval,
            resume_seconds=quartiles(resumes)[1],
            chain_length=chain,
            dcp_interval_seconds=quartiles(saves)[1] / max_overhead,
            dcp_save_seconds=quartiles(saves)[1],
            dcp_load_seconds=quartiles(loads)[1],
        ),
    ]


def _bare(training: Training, seconds: float) -> float:
    """Seconds of a step."""
    begun, before = time.perf_counter(), training.steps
    while time.perf_counter() - begun < seconds:
        training.step()
    return (time.perf_counter() - begun) / (training.steps - before)


@dataclass(frozen=True)
class _Window:
    """Whole intervals: from just after a save was durable to just after a later one was."""

    seconds: float
    steps: int
    events: tuple[SaveEvent, ...]

    @property
    def saves(self) -> int:
        return len(self.events)


@dataclass
class _Paced:
    """A checkpointer that saves as ``Adaptive`` says; its clock stands still between windows, and so does its
    watching."""

    training: Training
    folder: Path
    max_overhead: float
    chain_length: int = 0
    _events: list[SaveEvent] = field(default_factory=list)
    _away: float = 0.0

    def __enter__(self) -> Self:
        self._checkpointer = Checkpointer(
            self.training.model, self.folder, optimizer=self.training.optimizer, kind="consecutive",
            when=Adaptive(max_overhead=self.max_overhead), on_event=self._keep,
            clock=lambda: time.monotonic() - self._away,
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._checkpointer.__exit__(kind, error, trace)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def begin(self) -> None:
        """A base, and as many deltas as it takes until the pace is steady."""
        self._checkpointer.save_checkpoint(self.training.steps, kind=BASE).wait()
        self._train_until(lambda: len(self._events) >= 4)
        self._leave()

    def window(self, at_least: float) -> _Window:
        self._return()
        begun, steps, before = time.perf_counter(), self.training.steps, len(self._events)
        self._train_until(lambda: len(self._events) > before and time.perf_counter() - begun >= at_least)
        seconds = time.perf_counter() - begun
        self._leave()
        return _Window(seconds, self.training.steps - steps, tuple(self._events[before:]))

    def resume(self) -> float:
        return seconds_of(self._checkpointer.resume_from_checkpoint)

    def _train_until(self, enough: Callable[[], bool]) -> None:
        """Ends at a step at which a save has just become durable."""
        while True:
            known = len(self._events)
            self.training.step()
            self._checkpointer.step(self.training.steps)
            if len(self._events) > known and enough():
                return

    def _leave(self) -> None:
        self._left = time.monotonic()
        self._checkpointer._adapter.unwatch()

    def _return(self) -> None:
        tracker, schedule = self._checkpointer._tracker, self._checkpointer._schedule
        self._checkpointer._adapter.watch(schedule.timed(tracker.mark), tracker.mark_all)
        self._away += time.monotonic() - self._left

    def _keep(self, event: Event) -> None:
        if isinstance(event, SaveEvent):
            self._events.append(event)
        if isinstance(event, ResumeEvent):
            self.chain_length = event.chain_length
