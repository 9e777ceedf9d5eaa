"""Measures what training steps and saves cost, for policies that choose the interval by it.

It must not know clocks, ranks or how anything is saved: it is told durations, and what they were spent on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from incremental_ckpt.policy import Costs

WARM_UP_STEPS = 5
"""Steps that are not measured: a process's first ones allocate, compile and fill caches."""

PROFILED_STEPS = 20
"""Steps that are measured before the first save."""

_MEMORY = 1024  # steps: older ones weigh less than 1/e. Slowdown is a difference of means, so they have to be steady
_PAUSE = 100  # times the mean: no step but an evaluation, a debugger, a suspended machine
_CAUTION = 1.2  # a difference of noisy means is taken that much larger, so that the budget holds all the same; so is
# tracking, of which the hooks around the marks are not measured
_SAVES = 0.7  # how much of what was known of earlier saves still counts when one more is known


@dataclass
class _Mean:
    seconds: float = 0.0
    steps: float = 0.0

    def add(self, seconds: float, *, steps: float = 1.0, keep: float) -> None:
        self.seconds = self.seconds * keep + seconds
        self.steps = self.steps * keep + steps

    @property
    def step(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0


class CostMeter:
    """The costs of one run. Seconds throughout.

    Slowdown is found by comparison: steps during which a save was being persisted against all others, on average over
    the last saves, since a single one is short and noisy.
    """

    def __init__(self) -> None:
        self._undisturbed = _Mean()
        self._tracking = _Mean()
        self._disturbed = _Mean()
        self._while_this_save = _Mean()
        self._steps_seen = 0
        self._trained = 0.0
        self._stall = self._persist = self._slowdown = self._per_save = 0.0
        self._measured_a_save = False
        self._in_flight = False

    def begin(self) -> None:
        """A process begins, or goes on from a resume: what was measured holds, but its first steps are slower."""
        self._steps_seen = 0
        self._trained = 0.0
        self._in_flight = False
        self._while_this_save = _Mean()

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
        known = self._undisturbed.step
        if known and seconds > _PAUSE * known:
            return
        if persisting:
            self._while_this_save.add(seconds, keep=1.0)
        else:
            self._undisturbed.add(seconds, keep=1 - 1 / _MEMORY)
            self._tracking.add(tracking, keep=1 - 1 / _MEMORY)

    def stalled(self, seconds: float) -> None:
        """The checkpointer kept the training thread for so long without saving (a meeting, a wait)."""
        self._stall += seconds

    def saved(self, seconds: float) -> None:
        """A save was handed over after so long on the training thread: an interval begins."""
        self._stall = seconds
        self._persist = self._slowdown = self._trained = 0.0
        self._while_this_save = _Mean()
        self._in_flight = True

    def ended(self, persist_seconds: float) -> None:
        """The save is durable, or has failed, so long after it was handed over."""
        if not self._in_flight:
            return
        self._in_flight = False
        self._persist = persist_seconds
        own = self._while_this_save
        self._disturbed.add(own.seconds, steps=own.steps, keep=_SAVES)
        if self._disturbed.step:
            share = max(0.0, 1 - self._undisturbed.step / self._disturbed.step)
            self._slowdown = min(1.0, _CAUTION * share) * own.seconds
        self._trained = max(0.0, self._trained - self._slowdown)
        cost = self._stall + self._slowdown
        self._per_save = _SAVES * self._per_save + (1 - _SAVES) * cost if self._measured_a_save else cost
        self._measured_a_save = True

    @property
    def costs(self) -> Costs | None:
        """None until enough steps have been seen to begin with."""
        seen = self._steps_seen - WARM_UP_STEPS
        if not self._undisturbed.step or not (self._measured_a_save or self._in_flight or seen >= PROFILED_STEPS):
            return None
        return Costs(
            self._undisturbed.step, self._stall, self._persist, self._slowdown, self._per_save,
            durable=not self._in_flight, tracking=_CAUTION * self._tracking.step / self._undisturbed.step,
        )  # fmt: skip

    @property
    def trained_seconds(self) -> float:
        """Training since the last save. While one is in flight its slowdown is not known and not taken off."""
        return self._trained

    def state_dict(self) -> dict[str, Any]:
        """What has been measured before the save that this goes into."""
        return {
            "step_seconds": self._undisturbed.seconds, "steps": self._undisturbed.steps,
            "disturbed_seconds": self._disturbed.seconds, "disturbed_steps": self._disturbed.steps,
            "tracking_seconds": self._tracking.seconds,
            "persist": self._persist, "per_save": self._per_save if self._measured_a_save else None,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what an earlier life has measured. A state of another kind is left alone: measuring starts
        over."""
        names = ("step_seconds", "steps", "disturbed_seconds", "disturbed_steps", "persist")
        # What earlier versions have written does not tell of tracking.
        numbers = [state.get(name) for name in names] + [state.get("tracking_seconds", 0.0)]
        if not all(isinstance(n, float | int) and math.isfinite(n) and n >= 0 for n in numbers):
            return
        step_seconds, steps, disturbed_seconds, disturbed_steps, persist, tracking = (
            float(n) for n in numbers if n is not None
        )
        self._undisturbed = _Mean(step_seconds, steps)
        self._tracking = _Mean(tracking, steps if "tracking_seconds" in state else 0.0)
        self._disturbed = _Mean(disturbed_seconds, disturbed_steps)
        per_save = state.get("per_save")
        self._measured_a_save = per_save is not None
        # Of the save that this state came with, only what saves cost on average is known.
        self._stall = self._per_save = float(per_save or 0.0)
        self._persist, self._slowdown = persist, 0.0
