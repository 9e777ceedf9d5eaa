"""Measures what training steps and saves cost, for policies that choose the interval by it.

It must not know clocks, ranks or how anything is saved: it is told durations, and what they were spent on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from incremental_ckpt.policy import Costs

WARM_UP_STEPS = 5
"""Steps that are not measured: a process's first ones allocate, compile and fill caches."""

PROFILED_STEPS = 20
"""Steps that are measured before the first save."""

_MEMORY = 1024  # steps: older ones weigh less than 1/e
_NEAR = 32  # likewise, of the steps that those beside a save are compared with: a machine's speed drifts
_PAUSE = 100  # times the mean: no step or stall but an evaluation, a debugger, a suspended machine
_PAUSES = 3  # that are believed, one shortly after the other; more of them, and steps have become that long
_PAUSES_KEPT = 0.9  # how much of them still counts after each step that was none
_UNSEEN = (
    2.0  # tracking costs a step about twice what the marks take: there are hooks around them, and cold caches after
)
_SAVES = 8  # that a save's slowdown is told from, since a single one is short and noisy
_KEPT = 0.7  # how much of what was known of earlier saves still counts for the average one when one more is known


@dataclass
class _Mean:
    seconds: float = 0.0
    steps: float = 0.0

    def add(self, seconds: float, *, memory: float = math.inf) -> None:
        keep = 1 - 1 / memory
        self.seconds = self.seconds * keep + seconds
        self.steps = self.steps * keep + 1

    @property
    def step(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class _Beside:
    """The steps beside one save: what they took, and what of it they would not have taken without."""

    seconds: float
    extra: float


def _slowed_share(saves: Collection[_Beside]) -> float:
    """What saves take of the time of the steps beside them, and one standard error more, so that the budget holds
    although each of these differences is noisy."""
    seconds = sum(save.seconds for save in saves)
    if not seconds:
        return 0.0
    share = sum(save.extra for save in saves) / seconds
    if len(saves) == 1:
        error = abs(share)  # as good as unknown
    else:
        squares = sum((save.extra - share * save.seconds) ** 2 for save in saves)
        error = math.sqrt(squares * len(saves) / (len(saves) - 1)) / seconds
    return min(1.0, max(0.0, share) + error)


class CostMeter:
    """The costs of one run. Seconds throughout.

    Slowdown is found by comparison: steps during which a save was being persisted against those shortly before it.
    """

    def __init__(self) -> None:
        self._undisturbed = _Mean()
        self._tracking = _Mean()
        self._calls = _Mean()
        self._near = _Mean()
        self._while_this_save = _Mean()
        self._saves: deque[_Beside] = deque(maxlen=_SAVES)
        self._steps_seen = 0
        self._pauses = 0.0
        self._trained = 0.0
        self._stall = self._persist = self._slowdown = self._per_save = 0.0
        self._measured_a_save = False
        self._in_flight = False

    def begin(self) -> None:
        """A process begins, or goes on from a resume: what was measured holds, but its first steps are slower."""
        self._steps_seen = 0
        self._trained = 0.0
        self._in_flight = False
        self._near, self._while_this_save = _Mean(), _Mean()

    def trained(self, seconds: float, *, persisting: bool, tracking: float = 0.0) -> None:
        """A step took so long between two calls of the checkpointer.

        Args:
            persisting: a save was being persisted when it began.
            tracking: how much of it rows were being marked.
        """
        self._trained += seconds
        self._steps_seen += 1
        if self._steps_seen <= WARM_UP_STEPS:
            return
        if self._is_pause(seconds):
            return
        if persisting:
            self._while_this_save.add(seconds)
        else:
            self._undisturbed.add(seconds, memory=_MEMORY)
            self._near.add(seconds, memory=_NEAR)
            self._tracking.add(tracking, memory=_MEMORY)

    def _is_pause(self, seconds: float) -> bool:
        known = self._undisturbed.step
        if not known or seconds <= _PAUSE * known:
            self._pauses *= _PAUSES_KEPT
            return False
        self._pauses += 1
        if self._pauses <= _PAUSES:
            return True
        # What was measured were no steps: batches skipped, or those of another machine.
        self._undisturbed, self._near, self._tracking = _Mean(), _Mean(), _Mean()
        self._pauses = 0.0
        return False

    def called(self, seconds: float) -> None:
        """The checkpointer kept the training thread for so long at a step at which it did not save."""
        self._calls.add(seconds, memory=_MEMORY)

    def stalled(self, seconds: float) -> None:
        """It kept it for so long, and no save came of it."""
        self._stall += seconds

    def saved(self, seconds: float) -> None:
        """A save was handed over after so long on the training thread: an interval begins."""
        usual = self._per_save if self._measured_a_save else 0.0
        self._stall = min(seconds, _PAUSE * usual) if usual else seconds
        self._persist = self._slowdown = self._trained = 0.0
        self._while_this_save = _Mean()
        self._in_flight = True

    def ended(self, persist_seconds: float) -> None:
        """The save is durable, or has failed, so long after it was handed over."""
        if not self._in_flight:
            return
        self._in_flight = False
        self._persist = persist_seconds
        beside = self._while_this_save
        if beside.steps and self._near.steps:
            self._saves.append(_Beside(beside.seconds, beside.seconds - beside.steps * self._near.step))
        self._slowdown = _slowed_share(self._saves) * beside.seconds
        self._trained = max(0.0, self._trained - self._slowdown)
        cost = self._stall + self._slowdown
        self._per_save = _KEPT * self._per_save + (1 - _KEPT) * cost if self._measured_a_save else cost
        self._measured_a_save = True

    @property
    def costs(self) -> Costs | None:
        """None until enough steps have been seen to begin with."""
        seen = self._steps_seen - WARM_UP_STEPS
        if not self._undisturbed.step or not (self._measured_a_save or self._in_flight or seen >= PROFILED_STEPS):
            return None
        unasked = _UNSEEN * self._tracking.step + self._calls.step
        return Costs(
            self._undisturbed.step, self._stall, self._persist, self._slowdown, self._per_save,
            durable=not self._in_flight, tracking=unasked / self._undisturbed.step,
        )  # fmt: skip

    @property
    def trained_seconds(self) -> float:
        """Training since the last save. While one is in flight its slowdown is not known and not taken off."""
        return self._trained

    def state_dict(self) -> dict[str, Any]:
        """What has been measured before the save that this goes into."""
        return {
            "step_seconds": self._undisturbed.seconds, "steps": self._undisturbed.steps,
            "tracking_seconds": self._tracking.seconds,
            "saves": [[save.seconds, save.extra] for save in self._saves],
            "persist": self._persist, "per_save": self._per_save if self._measured_a_save else None,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what an earlier life has measured. A state of another kind is left alone: measuring starts
        over."""
        names = ("step_seconds", "steps", "tracking_seconds", "persist")
        try:
            step_seconds, steps, tracking, persist = (_duration(state[name]) for name in names)
            per_save = None if state["per_save"] is None else _duration(state["per_save"])
            saves = [_Beside(_duration(seconds), _finite(extra)) for seconds, extra in state["saves"]]
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        self._undisturbed = _Mean(step_seconds, steps)
        self._tracking = _Mean(tracking, steps)
        self._saves = deque(saves, maxlen=_SAVES)
        self._measured_a_save = per_save is not None
        # Of the save that this state came with, only what saves cost on average is known.
        self._stall = self._per_save = per_save or 0.0
        self._persist, self._slowdown = persist, 0.0


def _finite(number: Any) -> float:
    if not isinstance(number, float | int) or not math.isfinite(number):
        raise ValueError(number)
    return float(number)


def _duration(number: Any) -> float:
    if (finite := _finite(number)) < 0:
        raise ValueError(number)
    return finite
