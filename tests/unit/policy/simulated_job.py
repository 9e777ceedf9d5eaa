"""A training job on a simulated clock: steps, stalls and persists take the seconds that they are told to.

It must not know how an interval is chosen: it only asks the schedule, as the checkpointer does.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch

from incremental_ckpt.events import FailureEvent, IntervalEvent, SaveEvent
from incremental_ckpt.policy import BusyPolicy, When
from incremental_ckpt.schedule import Schedule

_ROWS = torch.arange(3)


@dataclass
class Costs:
    """Seconds; slowdown: how much longer a step takes while a save is persisted, as a share; tracking: of each step;
    call: of asking at each step; drift: by what share steps get longer and shorter again, within ``drift_steps``,
    whatever is saved."""

    step: float = 0.075
    stall: float = 0.02
    persist: float = 0.4
    slowdown: float = 0.04
    jitter: float = 0.0
    tracking: float = 0.0
    call: float = 0.0
    drift: float = 0.0
    drift_steps: int = 1500

    def of_step(self, number: int, noise: random.Random) -> float:
        """Seconds of a step beside which nothing is saved."""
        wave = math.sin(2 * math.pi * number / self.drift_steps)
        return self.step * (1 + self.jitter * noise.uniform(-1, 1)) * (1 + self.drift * wave)


@dataclass
class SimulatedJob:
    """
    Attributes:
        saves: steps at which saves were made.
    """

    when: tuple[When, ...]
    costs: Costs = field(default_factory=Costs)
    busy: BusyPolicy = "defer"
    alone: bool = True
    grace: float | None = None
    fails: bool = False
    now: float = 100.0
    step: int = 0
    saves: list[int] = field(default_factory=list)
    skips: list[int] = field(default_factory=list)
    meetings: list[int] = field(default_factory=list)
    intervals: list[IntervalEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.noise = random.Random(7)
        self.schedule = Schedule(self.when, self.busy, lambda: self.now, alone=self.alone, grace=self.grace)
        self.mark = self.schedule.timed(self._mark)
        self.durable_at: float | None = None
        self.persist_seconds = 0.0

    @property
    def in_flight(self) -> bool:
        return self.durable_at is not None and self.now < self.durable_at

    def run(self, steps: int) -> float:
        """Train; returns the overhead: what was no undisturbed training, as a share of the time that all took."""
        begun, useful = self.now, 0.0
        for _ in range(steps):
            seconds = self.costs.of_step(self.step, self.noise)
            useful += seconds
            self.now += seconds * (1 + self.costs.slowdown if self.in_flight else 1)
            self.mark(0, _ROWS)
            self.step += 1
            with self.schedule.boundary(lambda: self.in_flight):
                self._boundary()
        return 1 - useful / (self.now - begun)

    def _mark(self, _table: int, _rows: torch.Tensor) -> None:
        self.now += self.costs.tracking

    def _boundary(self) -> None:
        self.now += self.costs.call
        if self.durable_at is not None and self.now >= self.durable_at:
            self.durable_at = None
            event = FailureEvent(self.step, 1, OSError()) if self.fails else self._save_event()
            interval = self.schedule.learn(event)
            if interval is not None:
                self.intervals.append(interval)
        if not self.schedule.meets(self.step, None):
            return
        self.meetings.append(self.step)
        call = self.schedule.call(self.step, None, busy=self.in_flight)
        if call.go == "save":
            assert self.busy == "wait" or not self.in_flight
            self.now += self.costs.stall
            self.persist_seconds = self.costs.persist
            self.durable_at = self.now + self.costs.persist
            self.saves.append(self.step)
        elif call.go == "skip":
            self.skips.append(self.step)
        self.schedule.agreed(call, self.step, None)

    def _save_event(self) -> SaveEvent:
        return SaveEvent(
            len(self.saves), self.saves[-1], None, "delta", 1, 10, 100, self.costs.stall, self.persist_seconds, 2
        )  # fmt: skip

    def spacing(self) -> float:
        """Steps between the last ten saves (or fewer), on average."""
        last = self.saves[-11:]
        return (last[-1] - last[0]) / (len(last) - 1)
