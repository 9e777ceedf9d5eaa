"""At which steps the ranks meet, and what rank 0 says there: save, not yet, not this one.

It must not know how anything is saved. What every rank can decide alone (every k steps) needs no talk; what only rank 0
knows (clocks, costs, whether the last save is durable, that the job is to end) is told at meetings whose steps rank 0
has named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from incremental_ckpt.adaptive import CostMeter
from incremental_ckpt.events import Event, FailureEvent, IntervalEvent, SaveEvent
from incremental_ckpt.flight import Late
from incremental_ckpt.model import Mark
from incremental_ckpt.policy import Adaptive, BusyPolicy, EveryEpoch, Foresees, Moment, When, any_due
from incremental_ckpt.saving import Call

log = logging.getLogger("incremental_ckpt")

_MEETING_SECONDS = 1.0
_MAX_DEFERRAL = 16
_MEETINGS_IN_GRACE = 8
_WORTH_TELLING = 0.2  # change of the interval, as a share


class Schedule:
    """When this rank saves.

    Args:
        alone: the job has one rank, so every step may be a meeting.
        grace: on several ranks, meet often enough to save within so many seconds after a signal; None: signals are not
            watched.
    """

    def __init__(
        self,
        when: Sequence[When],
        busy: BusyPolicy,
        clock: Callable[[], float],
        *,
        alone: bool,
        grace: float | None = None,
    ) -> None:
        self._when = when
        self._on_all_ranks = [w for w in when if w.same_on_all_ranks]
        self._adaptive = next((w for w in when if isinstance(w, Adaptive)), None)
        self._meter = CostMeter()
        self._busy = busy
        self._clock = clock
        self._alone = alone
        self._grace = grace
        self._last_step: int | None = None
        self._last_epoch: int | None = None
        self._last_seconds = clock()
        self._deferrals = 0
        self._first_deferred: int | None = None
        self._skipped = 0
        self._next_meeting: int | None = None
        self._meeting_begun: tuple[int, float] | None = None
        self._left: tuple[float, bool] | None = None
        self._marked_seconds = 0.0
        self._saved_within = False
        self._told_steps = 0
        self._misses_epochs = any(isinstance(policy, EveryEpoch) for policy in when)

    def timed(self, mark: Mark) -> Mark:
        """The same, measured if a policy goes by what it costs."""
        if self._adaptive is None:
            return mark
        clock = self._clock

        def timed_mark(table: int, rows: torch.Tensor) -> None:
            begun = clock()
            mark(table, rows)
            self._marked_seconds += clock() - begun

        return timed_mark

    def check_epoch(self, epoch: int | None) -> None:
        """Raises ValueError where no save can ever happen because no step tells its epoch; warns once where some
        cannot."""
        if epoch is not None or not self._misses_epochs:
            return
        told = "EveryEpoch() saves where the epoch changes, and step() was given none: step(..., epoch=epoch)"
        if len(self._when) == 1:
            raise ValueError(told)
        log.warning("%s", told)
        self._misses_epochs = False

    @property
    def waits(self) -> bool:
        """Whether a save that is due waits for the one before."""
        return self._busy == "wait"

    def begin(self, step: int, epoch: int | None) -> None:
        """The first step is about to be seen, or a run was resumed after ``step``."""
        self._last_step, self._last_epoch, self._last_seconds = step, epoch, self._clock()
        self._deferrals, self._first_deferred, self._skipped = 0, None, 0
        self._next_meeting, self._meeting_begun = None, None
        self._left = None
        self._meter.begin()

    @contextmanager
    def boundary(self, busy: Callable[[], bool]) -> Iterator[None]:
        """The training thread is the checkpointer's: time within counts as cost, time between as training."""
        if self._adaptive is None:
            yield
            return
        entered = self._clock()
        if self._left is not None:
            self._meter.trained(
                max(0.0, entered - self._left[0]), persisting=self._left[1], tracking=self._marked_seconds
            )
        self._marked_seconds = 0.0
        self._saved_within, spend = False, self._meter.stalled
        try:
            yield
            spend = self._meter.called
        finally:
            left = self._clock()
            (self._meter.saved if self._saved_within else spend)(max(0.0, left - entered))
            self._left = (left, busy())

    def learn(self, event: Event) -> IntervalEvent | None:
        """Take in how a save ended. Returns the interval that follows from it, where it is another one."""
        if self._adaptive is None or not isinstance(event, SaveEvent | FailureEvent):
            return None
        now = self._clock()
        self._meter.ended(event.persist_seconds if isinstance(event, SaveEvent) else now - self._last_seconds)
        costs = self._meter.costs
        if costs is None:
            return None
        pace = self._adaptive.pace(costs)
        if abs(pace.steps - self._told_steps) <= _WORTH_TELLING * self._told_steps:
            return None
        self._told_steps = pace.steps
        return IntervalEvent(
            event.step,
            pace.steps,
            pace.bound_by,
            costs.step,
            costs.stall,
            costs.persist,
            costs.slowdown,
            costs.tracking * costs.step,
        )

    def state_dict(self) -> dict[str, Any]:
        """What has been measured; empty where nothing needs to be."""
        return self._meter.state_dict() if self._adaptive is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what an earlier life has measured."""
        self._meter.load_state_dict(state)

    def meets(self, step: int, epoch: int | None) -> bool:
        """Whether to ask ``call`` at this step; the same on every rank."""
        if self._last_step is None:
            self.begin(step - 1, epoch)
        if self._alone:
            return self._deferrals > 0 or any_due(self._when, self._moment(step, epoch))
        if self._last_step is not None and step < self._last_step:
            self._next_meeting = None  # that of the steps before the way back has passed
        if self._next_meeting is not None and step >= self._next_meeting:
            return True
        if self._next_meeting is None and self._needs_meetings:
            return True  # nobody has named a step yet
        return self._deferrals == 0 and any_due(self._on_all_ranks, self._moment(step, epoch))

    def call(self, step: int, epoch: int | None, *, busy: bool) -> Call:
        """What rank 0 says of this step. On other ranks the answer means nothing."""
        moment = self._moment(step, epoch)
        due = self._deferrals > 0 or any_due(self._when, moment)
        if due and busy and self._busy == "defer":
            # Ever rarer, so that waiting for a slow store costs few meetings.
            return Call("defer", step + min(2**self._deferrals, _MAX_DEFERRAL))
        following = self._meeting_after(moment, due=due)
        if not due:
            return Call("not due", following)
        return Call("skip" if busy and self._busy == "skip" else "save", following)

    def agreed(self, call: Call, step: int, epoch: int | None) -> None:
        """What rank 0 said, on every rank."""
        self._next_meeting = call.next_meeting
        if call.go == "defer":
            self._deferrals += 1
            self._first_deferred = step if self._first_deferred is None else self._first_deferred
        elif call.go != "not due":
            self._skipped = self._skipped + 1 if call.go == "skip" else 0
            self._saved_within = call.go == "save"
            self.passed(step, epoch)

    def late(self, step: int, waited_seconds: float) -> Late:
        """How late a save at this step is, and what it makes up for."""
        deferred = 0 if self._first_deferred is None else step - self._first_deferred
        return Late(deferred, waited_seconds, self._skipped)

    @property
    def skipped(self) -> int:
        """Saves left out since the last one."""
        return self._skipped

    @property
    def left_out(self) -> str:
        """Of the save that was due last, where it was not made: which it is and why; else nothing."""
        if self._first_deferred is not None:
            return f"a save was due at step {self._first_deferred}, was put off while the one before was not durable"
        if self._skipped:
            return f"a save was due at step {self._last_step}, was skipped since the one before was not durable"
        return ""

    def passed(self, step: int, epoch: int | None) -> None:
        """A save has happened, or one that was due is skipped."""
        self._last_step, self._last_epoch, self._last_seconds = step, epoch, self._clock()
        self._deferrals, self._first_deferred = 0, None

    @property
    def _needs_meetings(self) -> bool:
        """Whether there is something that only one rank knows."""
        return not self._alone and (self._grace is not None or len(self._on_all_ranks) < len(self._when))

    def _moment(self, step: int, epoch: int | None) -> Moment:
        assert self._last_step is not None
        costs, trained = (None, 0.0) if self._adaptive is None else (self._meter.costs, self._meter.trained_seconds)
        return Moment(
            step, epoch, self._clock(), self._last_step, self._last_epoch, self._last_seconds, costs, trained
        )  # fmt: skip

    def _meeting_after(self, moment: Moment, *, due: bool) -> int | None:
        """Half-way to where a policy may be due, since steps may become slower; soon enough for a signal; never more
        often than about once a second."""
        if not self._needs_meetings:
            return None
        step, now = moment.step, moment.seconds
        steps = 1
        if self._meeting_begun is not None and now > self._meeting_begun[1]:
            per_second = (step - self._meeting_begun[0]) / (now - self._meeting_begun[1])
            steps = max(1, int(per_second * self._rest_seconds(moment, due=due)))
        self._meeting_begun = (step, now)
        return step + steps

    def _rest_seconds(self, moment: Moment, *, due: bool) -> float:
        at_most = float("inf") if self._grace is None else self._grace / _MEETINGS_IN_GRACE
        # What follows a save is not known before it has been made.
        asked = [0.0] if due and len(self._on_all_ranks) < len(self._when) else []
        for policy in self._when:
            if not policy.same_on_all_ranks and not due:
                asked.append(policy.wait(moment) / 2 if isinstance(policy, Foresees) else 0.0)
        return min([at_most, max(_MEETING_SECONDS, min(asked, default=float("inf")))])
