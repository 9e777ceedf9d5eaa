"""What happened, as facts: one frozen dataclass per save, failed save, resume, change of the interval, prune and
compaction.

It must not know who listens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from incremental_ckpt.model import Kind


@dataclass(frozen=True)
class SaveEvent:
    """A checkpoint was committed. Times in seconds, sizes in bytes.

    Attributes:
        rows, table_rows: rows carried, and rows that there are.
        stall_seconds: from the call until parameters might change again.
        persist_seconds: from then until the checkpoint was committed.
        chain_length: how many checkpoints a resume from this one replays.
        deferred_steps: how many steps later than it was due, since the save before was not yet durable.
        waited_seconds: for how long training waited for the save before, ahead of the stall.
        skipped: saves left out since the one before.
    """

    seq: int
    step: int
    epoch: int | None
    kind: Kind
    rows: int
    table_rows: int
    bytes: int
    stall_seconds: float
    persist_seconds: float
    chain_length: int
    deferred_steps: int = 0
    waited_seconds: float = 0.0
    skipped: int = 0

    @property
    def share(self) -> float:
        """Rows carried as a share of all rows."""
        return self.rows / self.table_rows if self.table_rows else 1.0


@dataclass(frozen=True)
class FailureEvent:
    """A save failed; its rows go into the next one."""

    step: int
    seq: int
    error: Exception


@dataclass(frozen=True)
class SkipEvent:
    """A save that was due did not happen: the one before was not yet durable and ``busy`` says skip.

    Attributes:
        skipped: how many have been left out since the last save, this one included.
    """

    step: int
    skipped: int = 1


@dataclass(frozen=True)
class ResumeEvent:
    """A run was resumed.

    Attributes:
        passed_over: newer checkpoints that were damaged, each with the reason.
        bytes: bytes read.
    """

    seq: int
    step: int
    chain_length: int
    bytes: int
    seconds: float
    passed_over: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class IntervalEvent:
    """``Adaptive`` has chosen another interval. Times in seconds.

    Attributes:
        step: of the save after which it did.
        interval_steps: training steps from one save to the next.
        bound_by: what asks for no less.
        step_seconds: a training step while nothing is being persisted.
        stall_seconds, persist_seconds: of the last save.
        slowdown_seconds: what steps took longer, in sum, while it was persisted; like the next one an estimate that is
            rather too large.
        tracking_seconds: of a step, marking rows and looking whether to save.
    """

    step: int
    interval_steps: int
    bound_by: Literal["durable", "budget", "mtbf"]
    step_seconds: float
    stall_seconds: float
    persist_seconds: float
    slowdown_seconds: float
    tracking_seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"steps of {1e3 * self.step_seconds:.1f} ms ({1e3 * self.tracking_seconds:.1f} ms of it tracking), "
            f"stall {1e3 * self.stall_seconds:.1f} ms, durable after {self.persist_seconds:.2f} s, which slowed "
            f"steps by {1e3 * self.slowdown_seconds:.1f} ms in all: "
            f"a save every {self.interval_steps} steps (bound by: {self.bound_by})"
        )


@dataclass(frozen=True)
class PruneEvent:
    """Checkpoints that nothing keeps were forgotten.

    Attributes:
        step: of the save after which this happened.
        forgotten: their numbers.
        bytes_freed: of data that was deleted.
        failures: what could not be done, and is tried again after the next save.
    """

    step: int
    forgotten: tuple[int, ...]
    bytes_freed: int
    failures: tuple[str, ...]


@dataclass(frozen=True)
class CompactEvent:
    """A compaction beside the run has ended (``Settings.compact_after``).

    Attributes:
        step: of the save after which it began.
        seq: the checkpoint that has an equivalent base now.
        chain_length: how many checkpoints a resume from it replayed before.
        bytes: written.
        failure: why there is no equivalent; empty where there is one. It is tried again later.
    """

    step: int
    seq: int
    chain_length: int
    bytes: int
    seconds: float
    failure: str = ""


Event = SaveEvent | FailureEvent | SkipEvent | ResumeEvent | IntervalEvent | PruneEvent | CompactEvent
