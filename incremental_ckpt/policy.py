"""When to save and which kind: pure functions over facts.

It must not know clocks, stores or ranks: what it decides on is handed to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

KindPolicy = Literal["full", "one-shot", "consecutive", "intermittent"]
BusyPolicy = Literal["defer", "wait", "skip"]


@dataclass(frozen=True)
class Moment:
    """A step boundary, and the last one at which a save happened (or the run began). Seconds are of one monotonic
    clock."""

    step: int
    epoch: int | None
    seconds: float
    last_step: int
    last_epoch: int | None
    last_seconds: float


class When(Protocol):
    """Decides at step boundaries whether a save is due.

    Attributes:
        same_on_all_ranks: the answer follows from steps and epochs alone, so that every rank finds it by itself.
    """

    same_on_all_ranks: bool

    def due(self, moment: Moment) -> bool:
        """Whether to save now."""


@dataclass(frozen=True)
class EverySteps:
    """At every step number that ``steps`` divides."""

    steps: int
    same_on_all_ranks = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"EverySteps takes a positive number of steps, not {self.steps}")

    def due(self, moment: Moment) -> bool:
        return moment.step > 0 and moment.step // self.steps != moment.last_step // self.steps


@dataclass(frozen=True)
class EverySeconds:
    """When so many seconds have passed since the last save, or since the run began."""

    seconds: float
    same_on_all_ranks = False

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"EverySeconds takes a positive number of seconds, not {self.seconds}")

    def due(self, moment: Moment) -> bool:
        return moment.seconds - moment.last_seconds >= self.seconds


@dataclass(frozen=True)
class EveryEpoch:
    """At the first step of each new epoch."""

    same_on_all_ranks = True

    def due(self, moment: Moment) -> bool:
        return moment.epoch is not None and moment.last_epoch is not None and moment.epoch != moment.last_epoch


def any_due(policies: Sequence[When], moment: Moment) -> bool:
    """Whether one of several is due."""
    return any(policy.due(moment) for policy in policies)


@dataclass(frozen=True)
class NextKind:
    """What the next save is.

    Attributes:
        base: all rows.
        moves_parent: the save after it counts from it (a base, a consecutive delta).
    """

    base: bool
    moves_parent: bool


def choose_kind(policy: KindPolicy, shares: Sequence[float]) -> NextKind:
    """The kind of the next save.

    Args:
        shares: sizes of the deltas committed since the last base, each as a share of a full checkpoint, oldest first.

    ``intermittent`` is Check-N-Run's history-based predictor (NSDI'22, section 5.1): after deltas S_1..S_i a new base
    pays as soon as
    1 + S_1 + ... + S_i <= (i + 1) * S_i.
    """
    if policy not in get_args(KindPolicy):
        raise ValueError(f"kind must be one of {', '.join(get_args(KindPolicy))}, not {policy!r}")
    if policy == "full":
        return NextKind(base=True, moves_parent=True)
    if policy == "consecutive":
        return NextKind(base=False, moves_parent=True)
    if policy == "intermittent" and shares and 1 + sum(shares) <= (len(shares) + 1) * shares[-1]:
        return NextKind(base=True, moves_parent=True)
    return NextKind(base=False, moves_parent=False)
