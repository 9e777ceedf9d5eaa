"""What happened, as facts: one frozen dataclass per save, failed save and resume.

It must not know who listens.
"""

from __future__ import annotations

from dataclasses import dataclass

from incremental_ckpt.model import Kind


@dataclass(frozen=True)
class SaveEvent:
    """A checkpoint was committed. Times in seconds, sizes in bytes.

    Attributes:
        rows, table_rows: rows carried, and rows that there are.
        stall_seconds: from the call until parameters might change again.
        persist_seconds: from then until the checkpoint was committed.
        chain_length: how many checkpoints a resume from this one replays.
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
    """A save that was due did not happen: the one before was not yet durable and ``busy`` says skip."""

    step: int


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


Event = SaveEvent | FailureEvent | SkipEvent | ResumeEvent
