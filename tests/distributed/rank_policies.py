"""What the ranks of a job do whose saves are chosen by what they cost, and pruned. Each rank tells what it saw.

It must not know what any test expects.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rank_processes import connect
from rank_troubles import Run

from incremental_ckpt import Adaptive, Checkpointer, KeepBest, KeepLast, Settings
from incremental_ckpt.events import IntervalEvent, PruneEvent

STEP_SECONDS = 0.1


@dataclass
class Watched:
    """What a rank saw of a life.

    Attributes:
        resumed: the step.
        saves: their steps.
        stalled, seconds: in stalls, and in all, by this rank's clock.
        intervals: that were chosen, in steps.
        forgotten: by prunes.
        lines: of the log that tell of a save.
        tables: the table after the resume and at each save, by step.
    """

    resumed: int = 0
    saves: list[int] = field(default_factory=list)
    stalled: float = 0.0
    seconds: float = 0.0
    intervals: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    lines: int = 0
    tables: dict[int, np.ndarray] = field(default_factory=dict)


class Clock:
    """Of rank 0. Those of other ranks stand still: nothing may depend on them. Its own state takes time to copy."""

    def __init__(self, rank: int, stall: float) -> None:
        self.now = self.stalled = 0.0
        self.stall = stall
        self._runs = rank == 0

    def passes(self, seconds: float) -> None:
        if self._runs:
            self.now += seconds

    def state_dict(self) -> dict[str, Any]:
        self.passes(self.stall)
        self.stalled += self.stall
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.saved = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.saved += record.getMessage().startswith("saved step")


def by_the_costs(rank: int, world_size: int, url: str, budget: float, stalls: list[float], steps: int) -> Watched:
    """Train so many steps at each of several durations of a stall. One-shot saves of which two are kept."""
    connect()
    lines = Lines()
    logging.disable(logging.NOTSET)
    logging.getLogger("incremental_ckpt").addHandler(lines)
    logging.getLogger("incremental_ckpt").setLevel(logging.INFO)
    run, clock, watched = Run(rank), Clock(rank, stalls[0]), Watched()
    run.optimizer.param_groups[0]["lr"] = 0.003  # else nothing is left to learn after some steps

    def table() -> np.ndarray:
        return run.model.module.table.weight.detach().clone().numpy()

    def watch(event: Any) -> None:
        if isinstance(event, IntervalEvent):
            watched.intervals.append(event.interval_steps)
        if isinstance(event, PruneEvent):
            assert not event.failures
            watched.forgotten.extend(event.forgotten)

    with Checkpointer(
        run.model, url, optimizer=run.optimizer, state={"clock": clock}, when=Adaptive(budget), kind="one-shot",
        keep=[KeepLast(2), KeepBest(1, "loss", "min")], on_event=watch, clock=lambda: clock.now,
        settings=Settings(vote_timeout=30, drain_timeout=20, low_priority=False),
    ) as checkpointer:  # fmt: skip
        progress = checkpointer.resume_from_checkpoint()
        watched.resumed = progress.step if progress else 0
        watched.tables[watched.resumed] = table()
        for index in range(steps * len(stalls)):
            clock.stall = stalls[index // steps]
            number = watched.resumed + index + 1
            run.step(number % 50)
            clock.passes(STEP_SECONDS)
            handle = checkpointer.step(number, loss=abs(60.0 - number))
            if handle is not None:
                watched.saves.append(handle.step)
                watched.tables[handle.step] = table()
                handle.wait()
                torch.distributed.barrier()  # rank 0 sees it durable at the same step each time
    watched.stalled, watched.seconds, watched.lines = clock.stalled, clock.now, lines.saved
    return watched
