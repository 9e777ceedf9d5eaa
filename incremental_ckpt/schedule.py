"""At which steps the ranks meet, and what rank 0 says there: save, not yet, not this one.

It must not know how anything is saved. What every rank can decide alone (every k steps) needs no talk; what only rank 0
knows
(clocks, whether the last save is durable) is asked at meetings whose steps rank 0 has named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from incremental_ckpt.policy import BusyPolicy, Moment, When, any_due
from incremental_ckpt.saving import Call

_MEETING_SECONDS = 1.0
_MAX_DEFERRAL = 16


class Schedule:
    """When this rank saves.

    Args:
        alone: the job has one rank, so every step may be a meeting.
    """

    def __init__(self, when: Sequence[When], busy: BusyPolicy, clock: Callable[[], float], *, alone: bool) -> None:
        self._when = when
        self._on_all_ranks = [w for w in when if w.same_on_all_ranks]
        self._busy = busy
        self._clock = clock
        self._alone = alone
        self._last_step: int | None = None
        self._last_epoch: int | None = None
        self._last_seconds = clock()
        self._deferrals = 0
        self._next_meeting: int | None = None
        self._meeting_begun: tuple[int, float] | None = None

    @property
    def waits(self) -> bool:
        """Whether a save that is due waits for the one before."""
        return self._busy == "wait"

    def begin(self, step: int, epoch: int | None) -> None:
        """The first step is about to be seen, or a run was resumed after ``step``."""
        self._last_step, self._last_epoch, self._last_seconds = step, epoch, self._clock()
        self._deferrals, self._next_meeting, self._meeting_begun = 0, None, None

    def meets(self, step: int, epoch: int | None) -> bool:
        """Whether to ask ``call`` at this step; the same on every rank."""
        if self._last_step is None:
            self.begin(step - 1, epoch)
        if self._alone:
            return self._deferrals > 0 or any_due(self._when, self._moment(step, epoch))
        if self._next_meeting is not None and step >= self._next_meeting:
            return True
        if self._next_meeting is None and len(self._on_all_ranks) < len(self._when):
            return True  # nobody has named a step yet
        return self._deferrals == 0 and any_due(self._on_all_ranks, self._moment(step, epoch))

    def call(self, step: int, epoch: int | None, *, busy: bool) -> Call:
        """What rank 0 says of this step. On other ranks the answer means nothing."""
        due = self._deferrals > 0 or any_due(self._when, self._moment(step, epoch))
        if due and busy and self._busy == "defer":
            # Ever rarer, so that waiting for a slow store costs few meetings.
            return Call("defer", step + min(2**self._deferrals, _MAX_DEFERRAL))
        following = self._meeting_after(step)
        if not due:
            return Call("not due", following)
        return Call("skip" if busy and self._busy == "skip" else "save", following)

    def agreed(self, call: Call, step: int, epoch: int | None) -> None:
        """What rank 0 said, on every rank."""
        self._next_meeting = call.next_meeting
        if call.go == "defer":
            self._deferrals += 1
        elif call.go != "not due":
            self.passed(step, epoch)

    def passed(self, step: int, epoch: int | None) -> None:
        """A save has happened, or one that was due is skipped."""
        self._last_step, self._last_epoch, self._last_seconds = step, epoch, self._clock()
        self._deferrals = 0

    def _moment(self, step: int, epoch: int | None) -> Moment:
        assert self._last_step is not None
        return Moment(step, epoch, self._clock(), self._last_step, self._last_epoch, self._last_seconds)

    def _meeting_after(self, step: int) -> int | None:
        """About once a second, where a policy looks at the clock."""
        if self._alone or len(self._on_all_ranks) == len(self._when):
            return None
        now = self._clock()
        steps = 1
        if self._meeting_begun is not None and now > self._meeting_begun[1]:
            per_second = (step - self._meeting_begun[0]) / (now - self._meeting_begun[1])
            steps = max(1, int(per_second * _MEETING_SECONDS))
        self._meeting_begun = (step, now)
        return step + steps
