"""When to save, which kind, and what to keep: pure functions over facts.

It must not know clocks, stores or ranks: what it decides on is handed to it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from incremental_ckpt.model import CheckpointInfo

_LEAST_FOR_SAVES = 0.25  # of the budget

KindPolicy = Literal["full", "one-shot", "consecutive", "intermittent"]
BusyPolicy = Literal["defer", "wait", "skip"]


@dataclass(frozen=True)
class Costs:
    """What training steps and the last save cost, as measured. All in seconds.

    Attributes:
        step: a training step while nothing is being persisted, on average.
        stall: for how long the last save kept the training thread; 0 where none has been seen yet.
        persist: from then until it was durable (or had failed).
        slowdown: what training steps took longer meanwhile, in sum.
        per_save: stall and slowdown, averaged over the last saves.
        durable: whether the last save has ended.
        tracking: marking the rows that change and looking whether to save, as a share of a step.
    """

    step: float
    stall: float = 0.0
    persist: float = 0.0
    slowdown: float = 0.0
    per_save: float = 0.0
    durable: bool = True
    tracking: float = 0.0


@dataclass(frozen=True)
class Moment:
    """A step boundary, and the last one at which a save happened (or the run began). Seconds are of one monotonic
    clock.

    Attributes:
        costs: what has been measured; None while there is too little of it.
        trained_seconds: training since the last save, without stalls and slowdown.
    """

    step: int
    epoch: int | None
    seconds: float
    last_step: int
    last_epoch: int | None
    last_seconds: float
    costs: Costs | None = None
    trained_seconds: float = 0.0


class When(Protocol):
    """Decides at step boundaries whether a save is due.

    Attributes:
        same_on_all_ranks: the answer follows from steps and epochs alone, so that every rank finds it by itself.
    """

    same_on_all_ranks: bool

    def due(self, moment: Moment) -> bool:
        """Whether to save now."""


@runtime_checkable
class Foresees(Protocol):
    """A policy that looks at the clock and knows how long it need not be asked."""

    def wait(self, moment: Moment) -> float:
        """Seconds until it may be due at the earliest; 0 where it cannot tell."""


@dataclass(frozen=True)
class EverySteps:
    """At every step number that ``steps`` divides."""

    steps: int
    same_on_all_ranks = True

    def __post_init__(self) -> None:
        _check_count("EverySteps", "number of steps", self.steps)

    def due(self, moment: Moment) -> bool:
        return moment.step > 0 and moment.step // self.steps != moment.last_step // self.steps


@dataclass(frozen=True)
class EverySeconds:
    """When so many seconds have passed since the last save, or since the run began."""

    seconds: float
    same_on_all_ranks = False

    def __post_init__(self) -> None:
        _check_positive("EverySeconds", "number of seconds", self.seconds)

    def due(self, moment: Moment) -> bool:
        return moment.seconds - moment.last_seconds >= self.seconds

    def wait(self, moment: Moment) -> float:
        return max(0.0, self.seconds - (moment.seconds - moment.last_seconds))


@dataclass(frozen=True)
class EveryEpoch:
    """At the first step of each new epoch."""

    same_on_all_ranks = True

    def due(self, moment: Moment) -> bool:
        return moment.epoch is not None and moment.last_epoch is not None and moment.epoch != moment.last_epoch


@dataclass(frozen=True)
class Pace:
    """How far apart saves should be.

    Attributes:
        steps: training steps from one save to the next.
        seconds: of undisturbed training that the last save has to be followed by, whether it is durable or not.
        bound_by: what asks for no less: that the last save is ``durable``, the ``budget``, or the ``mtbf``.
    """

    steps: int
    seconds: float
    bound_by: Literal["durable", "budget", "mtbf"]


@dataclass(frozen=True)
class Adaptive:
    """As often as the costs measured allow, after CheckFreq (FAST'21).

    Every save pays for itself: the next one comes when stall and slowdown of the last are at most ``max_overhead`` of
    the training since, less what marking rows takes of it anyway, and the last is durable. So the overhead stays in the
    budget, whatever a save costs and however that changes.

    Args:
        max_overhead: the budget, as a share of training time.
        mtbf: mean time between failures in seconds. Saves are then no more frequent than Young and Daly find best:
            every sqrt(2 * cost of a save * mtbf) seconds; None: as frequent as the budget allows.
    """

    max_overhead: float = 0.035
    mtbf: float | None = None
    same_on_all_ranks = False

    def __post_init__(self) -> None:
        _check_positive("Adaptive", "share of training time", self.max_overhead)
        if self.max_overhead >= 1:
            raise ValueError(f"Adaptive takes a share of training time, 0.035 for 3.5 %, not {self.max_overhead}")
        if self.mtbf is not None:
            _check_positive("Adaptive", "mtbf in seconds, or None", self.mtbf, at_most=math.inf)

    def due(self, moment: Moment) -> bool:
        costs = moment.costs
        return costs is not None and costs.durable and moment.trained_seconds >= self.pace(costs).seconds

    def wait(self, moment: Moment) -> float:
        if moment.costs is None or not moment.costs.durable:
            return 0.0
        return max(0.0, self.pace(moment.costs).seconds - moment.trained_seconds)

    def pace(self, costs: Costs) -> Pace:
        """The interval that these costs ask for."""
        # While a save is persisted, `slowdown` of its seconds is no training: the rest is what the steps have to fill.
        asked: dict[Literal["durable", "budget", "mtbf"], float] = {
            "durable": max(0.0, costs.persist - costs.slowdown),
            "budget": (costs.stall + costs.slowdown) / self._left_for_saves(costs),
        }
        if self.mtbf is not None:
            asked["mtbf"] = math.sqrt(2 * costs.per_save * self.mtbf)
        bound_by = max(asked, key=lambda name: asked[name])
        seconds = max(asked["budget"], asked.get("mtbf", 0.0))
        return Pace(_steps_in(asked[bound_by], costs.step), seconds, bound_by)

    def _left_for_saves(self, costs: Costs) -> float:
        """Where marking takes nearly all of the budget, or more, some of it is kept for saves all the same."""
        return max(self.max_overhead - costs.tracking, _LEAST_FOR_SAVES * self.max_overhead)


def _steps_in(seconds: float, step: float) -> int:
    return max(1, math.ceil(seconds / step - 1e-9)) if step > 0 else 1  # 0.07 / 0.035 / 0.1 is a little over 20


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


@dataclass(frozen=True)
class Chain:
    """What a resume from the next delta would replay before it.

    Attributes:
        length: checkpoints, the base included.
        bytes: theirs in sum.
        last_bytes: of the last delta, which foretells the next one; 0 where there is none.
    """

    length: int = 1
    bytes: int = 0
    last_bytes: int = 0


@dataclass(frozen=True)
class ChainLimit:
    """How long chains may grow; None: as long as they like.

    Attributes:
        length: checkpoints, the base included.
        bytes: what a resume may have to read.
    """

    length: int | None = None
    bytes: int | None = None

    def reached(self, chain: Chain) -> bool:
        """Whether one more delta, of the size of the last one, would be too much."""
        too_long = self.length is not None and chain.length >= self.length
        return too_long or (self.bytes is not None and chain.bytes + chain.last_bytes > self.bytes)


def choose_kind(
    policy: KindPolicy, shares: Sequence[float], chain: Chain = Chain(), limit: ChainLimit = ChainLimit()
) -> NextKind:
    """The kind of the next save.

    Args:
        shares: sizes of the deltas that count from the same parent as the next one would, each as a share of a full
            checkpoint, oldest first.
        chain: what the next delta would extend.
        limit: a base is due where a delta would take the chain beyond it.

    ``intermittent`` is Check-N-Run's history-based predictor (NSDI'22, section 5.1): after deltas S_1..S_i a new base
    pays as soon as
    1 + S_1 + ... + S_i <= (i + 1) * S_i.
    """
    if policy not in get_args(KindPolicy):
        raise ValueError(f"kind must be one of {', '.join(get_args(KindPolicy))}, not {policy!r}")
    if policy == "full" or limit.reached(chain):
        return NextKind(base=True, moves_parent=True)
    if policy == "consecutive":
        return NextKind(base=False, moves_parent=True)
    if policy == "intermittent" and shares and 1 + sum(shares) <= (len(shares) + 1) * shares[-1]:
        return NextKind(base=True, moves_parent=True)
    return NextKind(base=False, moves_parent=False)


class Keep(Protocol):
    """Says which checkpoints are worth keeping. What those need, and what is in use, is kept besides."""

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        """Numbers of those to keep, out of all that can be restored, by ascending seq. That the others are gone must
        change nothing about the answer."""


@dataclass(frozen=True)
class KeepLast:
    """The ``count`` newest."""

    count: int

    def __post_init__(self) -> None:
        _check_count("KeepLast", "number of checkpoints", self.count)

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        return frozenset(info.seq for info in checkpoints[-self.count :])


@dataclass(frozen=True)
class KeepBest:
    """The ``count`` best by a metric (``loss``: the loss, where no metric has that name); of equal ones the newer.

    Without a mode the best loss is the least, the best of any other metric the greatest.

    Checkpoints without it, or where it is not a number, are none of the best; where all are like that, all are kept:
    its name may be misspelt.
    """

    count: int
    metric: str
    mode: Literal["max", "min"] | None = None

    def __post_init__(self) -> None:
        _check_count("KeepBest", "number of checkpoints", self.count)
        if not isinstance(self.metric, str) or not self.metric:
            raise TypeError(f"KeepBest takes the name of a metric, such as 'auc', not {self.metric!r}")
        if self.mode not in ("max", "min", None):
            raise ValueError(f"KeepBest takes the mode 'max' or 'min', not {self.mode!r}")

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        least = self.mode == "min" or (self.mode is None and self.metric == "loss")
        sign = -1.0 if least else 1.0
        values = {info.seq: self.value(info) for info in checkpoints}
        ranked = sorted((sign * v, seq) for seq, v in values.items() if v is not None and v == v)
        if not ranked:
            return frozenset(values)
        return frozenset(seq for _, seq in ranked[-self.count :])

    def value(self, info: CheckpointInfo) -> float | None:
        """What a checkpoint is ranked by; None where it has none."""
        return info.metrics.get(self.metric, info.loss if self.metric == "loss" else None)


@dataclass(frozen=True)
class KeepEvery:
    """The first checkpoint at or after each multiple of ``steps``; of equal steps the newest."""

    steps: int

    def __post_init__(self) -> None:
        _check_count("KeepEvery", "number of steps", self.steps)

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        first: dict[int, CheckpointInfo] = {}
        for info in checkpoints:
            known = first.get(info.step // self.steps)
            if known is None or info.step <= known.step:
                first[info.step // self.steps] = info
        # Before the first multiple beyond 0 there is only step 0 itself.
        return frozenset(info.seq for number, info in first.items() if number > 0 or info.step == 0)


def kept_by_any(policies: Sequence[Keep], checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
    """What at least one of several keeps."""
    return frozenset().union(*(policy.kept(checkpoints) for policy in policies))


def _check_count(policy: str, what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{policy} takes a {what}, an int, not {value!r}")
    _check_positive(policy, what, value)


def _check_positive(policy: str, what: str, value: Any, *, at_most: float = sys.float_info.max) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{policy} takes a {what}, not {value!r}")
    if not 0 < float(value) <= at_most:
        raise ValueError(f"{policy} takes a positive {what}, not {value}")
