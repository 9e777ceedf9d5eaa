"""A save on its way: the handle that the caller holds, and the attempt with what is known of it.

It must not know how a save is planned or written.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from incremental_ckpt.arguments import seconds
from incremental_ckpt.errors import CheckpointError
from incremental_ckpt.model import CheckpointInfo, Shard
from incremental_ckpt.persist import Verdict
from incremental_ckpt.rank_writer import Attempt


class SaveHandle:
    """A save that has been handed over. Thread-safe."""

    def __init__(self, step: int, seq: int) -> None:
        self.step = step
        self.seq = seq
        self._finished = threading.Event()
        self._info: CheckpointInfo | None = None
        self._error: CheckpointError | None = None
        self._raised = False

    def done(self) -> bool:
        """Whether the checkpoint is committed, or the save has failed."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> CheckpointInfo:
        """Block until the checkpoint is committed.

        Raises:
            SaveError, ConflictError: what went wrong; it is then not raised again elsewhere.
            TimeoutError: not done within ``timeout`` seconds; the save goes on.
            TypeError, ValueError: ``timeout`` is no number of seconds.
        """
        if timeout is not None:
            timeout = seconds("timeout", timeout)
        if not self._finished.wait(timeout):
            raise TimeoutError(
                f"the save of step {self.step} (seq {self.seq}) is not done after {timeout} s; it goes on"
            )
        if self._error is not None:
            self._raised = True
            raise self._error
        assert self._info is not None
        return self._info

    def _finish(self, info: CheckpointInfo | None, error: CheckpointError | None) -> None:
        if self.done():
            return  # rank 0 had told the outcome before this rank's store answered
        self._info, self._error = info, error
        self._finished.set()

    def _unraised(self) -> CheckpointError | None:
        """The failure, if nobody has been told of it; whoever asks has been."""
        if not self.done() or self._raised or self._error is None:
            return None
        self._raised = True
        return self._error


@dataclass(frozen=True)
class Late:
    """Why a save comes later than it was due.

    Attributes:
        deferred_steps: steps since it was due.
        waited_seconds: what training waited for the save before.
        skipped: saves left out since the one before.
    """

    deferred_steps: int = 0
    waited_seconds: float = 0.0
    skipped: int = 0

    def __str__(self) -> str:
        reasons = [
            f"deferred by {self.deferred_steps} step{'s' * (self.deferred_steps != 1)}" if self.deferred_steps else "",
            f"training waited {self.waited_seconds:.2f} s for the save before" if self.waited_seconds else "",
            f"{self.skipped} skipped before" if self.skipped else "",
        ]
        return ", ".join(r for r in reasons if r)


@dataclass
class Flight:
    """The one attempt that may be under way.

    Attributes:
        chain_length: how many checkpoints a resume from it replays.
        handed_over: the background has it, or is about to.
        last: the job ends once it is durable.
        outcome: rank 0's word, once it is told.
        interrupt: set when rank 0 has told the outcome: this rank need not look for it any more.
        written: set when the background has let go of the snapshot.
    """

    attempt: Attempt
    handle: SaveHandle
    shards: tuple[Shard, ...]
    stall_seconds: float = 0.0
    late: Late = Late()
    chain_length: int = 1
    last: bool = False
    handed_over: bool = False
    outcome: Mapping[str, Any] | None = None
    verdict: Verdict | None = None
    interrupt: threading.Event = field(default_factory=threading.Event)
    written: threading.Event = field(default_factory=threading.Event)
