"""One save after another: meet, settle the marks of the save before, freeze, copy (the stall), hand over to the
background.

It must not know when saves are due, nor which number and parent they get.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from incremental_ckpt.agreement import (
    Report,
    check_same_call,
    first_error,
    make_error,
    read_plan,
    written_error,
    written_plan,
)
from incremental_ckpt.background import Background, Worker
from incremental_ckpt.codecs import Chosen
from incremental_ckpt.coordinator import Coordinator
from incremental_ckpt.errors import CheckpointError, SaveError
from incremental_ckpt.events import Event
from incremental_ckpt.flight import Flight, Late, SaveHandle
from incremental_ckpt.model import ModelAdapter, Shard, Table
from incremental_ckpt.persist import Persister
from incremental_ckpt.planning import Facts, Planner, as_base
from incremental_ckpt.policy import ChainLimit, KindPolicy
from incremental_ckpt.rank_writer import Attempt, Content
from incremental_ckpt.repository import Repository
from incremental_ckpt.settings import Settings
from incremental_ckpt.stall import Prepared, Snapshots
from incremental_ckpt.tracker import Tracker
from incremental_ckpt.units import size

log = logging.getLogger("incremental_ckpt")

_WORTH_A_WORD = 1 << 20
"""Bytes of a table from which on it matters that all of it is saved."""
_NAMED = 5


@dataclass(frozen=True)
class Call:
    """What rank 0 has decided about a meeting, and the others learn in it.

    Attributes:
        go: ``save``, or why not.
        next_meeting: the step of the next meeting, where only rank 0 knows whether a save is due.
        last: the job is to end once this save is durable.
    """

    go: Literal["save", "defer", "skip", "not due"] = "save"
    next_meeting: int | None = None
    last: bool = False


class Saver:
    """Saves of one job on one rank. All methods are called from the training thread.

    Attributes:
        planner: rank 0's plans.
        call: what the last meeting decided.
        preempted: some rank has said at a meeting that the job is to end.
    """

    def __init__(
        self,
        repository: Repository,
        adapter: ModelAdapter,
        tracker: Tracker,
        coordinator: Coordinator,
        codecs: Chosen,
        settings: Settings,
        *,
        job: str,
        environment: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        after_commit: Callable[[int], Event | None] | None = None,
    ) -> None:
        limit = ChainLimit(settings.chain_length, settings.chain_bytes)
        self.planner = Planner(repository, job, environment, limit, codecs.auto)
        self.call = Call()
        self.preempted = False
        self._repository = repository
        self._adapter = adapter
        self._tracker = tracker
        self._coordinator = coordinator
        self._settings = settings
        self._clock = clock
        self._rank, self._world_size = coordinator.rank, coordinator.world_size
        self._background = Background(
            Persister(
                repository, {"weight": codecs.weight, "optimizer": codecs.optimizer}, settings,
                rank=self._rank, world_size=self._world_size, clock=clock,
            ),
            Worker(low_priority=settings.low_priority),
            rank=self._rank, clock=clock, after_commit=after_commit,
        )  # fmt: skip
        self._snapshots = Snapshots(adapter, tracker, settings, rank=self._rank, world_size=self._world_size)
        self._flight: Flight | None = None
        self._told: Report | None = None
        self._parent_shards: tuple[Shard, ...] = ()
        self._last_step: int | None = None
        self._durable_step: int | None = None
        self._told_of_whole_tables = False

    def restart(self) -> None:
        """The model is exactly the checkpoint that the next delta counts from (after a resume), or nothing was resumed:
        no row is marked, and no save is in flight."""
        self._forget_flight()
        self._last_step = None
        self._adapter.begin()
        self._parent_shards = tuple(t.shard for t in self._adapter.tables())
        self._tracker.reset()

    def must_start_over(self) -> None:
        """Rows may be about to change unmarked (a resume that may fail half-way): the next save is a base."""
        self._forget_flight()
        self.planner.must_start_over()

    def _forget_flight(self) -> None:
        self._settle_late()
        if self._flight is not None:
            self._settle(self._outcome())

    @property
    def busy(self) -> bool:
        return self._flight is not None and not self._flight.handle.done()

    @property
    def durable_step(self) -> int | None:
        """The step of the last save that is durable, if there is one; any thread may ask."""
        flight = self._flight
        return self._durable_step if flight is None or flight.handle._info is None else flight.attempt.step

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        return self._background.events()

    def raise_failure(self) -> None:
        """Raise the failure of the last save, once, if nobody has been told of it."""
        if self._flight is not None and (error := self._flight.handle._unraised()) is not None:
            raise error

    def settle(self) -> None:
        """Meet, and let every rank learn how the last save ended.

        Raises:
            SaveError, ConflictError: it failed and nobody has been told yet; on every rank.
        """
        report: Report = {"what": "settle", "go": "save", "next": None, "outcome": self._outcome(), "lost": None}
        reports = self._coordinator.meet(report)
        check_same_call(reports)
        self._take_in(reports[0])

    def drain(self, timeout: float | None) -> None:
        """Wait for what is in flight.

        Raises:
            SaveError: it is not done in time; it goes on.
        """
        if self._flight is not None and not self._flight.handle._finished.wait(timeout):
            raise SaveError(
                f"the save of step {self._flight.attempt.step} (seq {self._flight.attempt.seq}) is not done after "
                f"{timeout:g} s (Settings.drain_timeout); does {self._repository.store.url} answer?"
            )

    def save(
        self,
        facts: Facts,
        kind: KindPolicy,
        extra_state: Callable[[], Mapping[str, Any]],
        call: Call = Call(),
        *,
        late: Late = Late(),  # noqa: B008
        preempted: bool = False,
    ) -> SaveHandle | None:
        """Meet; if the call says so, freeze and copy, then hand over. On rank 0 nothing is in flight then.

        Args:
            late: goes into the event.
            preempted: this rank has been told that the job is to end; the others are to know.

        Returns:
            None where rank 0 decided not to save.

        Raises:
            ConflictError: another job has gone on; this one can save no more.
            SaveError: nothing was saved; the rows stay marked. On every rank, whichever it was that failed.
        """
        begun = self._clock()
        report: Report = {"what": "save", "step": facts.step, "error": None, "changed": False}
        report["preempted"] = preempted
        prepared: Prepared | None = None
        attempt: Attempt | None = None
        failure: Exception | None = None
        if self._rank == 0:
            report |= {"go": call.go, "next": call.next_meeting, "last": call.last}
            report |= {"outcome": self._outcome(), "plan": None}
            report["lost"] = str(self.planner.lost) if self.planner.lost is not None else None
        try:
            self._settle_late()
            if call.go == "save" or self._rank != 0:
                prepared = self._snapshots.prepare(extra_state)
                report["changed"] = prepared.shards != self._shards_of_parent()
            if self._rank == 0 and call.go == "save" and self.planner.lost is None and not self._failed(report):
                attempt = self.planner.plan(facts, kind)
                report["plan"] = {
                    **written_plan(attempt),
                    "weight_codec": attempt.weight_codec,
                    "chain_length": self.planner.chain_length(attempt),
                }
        except Exception as cause:  # whatever it is, the other ranks are to hear of it
            failure = cause
            report["error"] = written_error(cause)
        reports = self._coordinator.meet(report)
        check_same_call(reports)
        self._take_in(reports[0])
        if any(r["preempted"] for r in reports) and not self.call.last:
            self.preempted = True
            self.call = replace(self.call, next_meeting=facts.step + 1)
        if self.call.go != "save":
            return None
        if self.call.last and self._rank == 0:
            log.warning("SIGTERM: saving step %d, the last save before the process ends", facts.step)
        if (told := first_error(reports, self._rank)) is not None:
            text = f"save of step {facts.step} failed before anything was written: {failure or told}"
            if isinstance(failure, SaveError) or not isinstance(failure, CheckpointError | None):
                raise failure
            raise SaveError(text) from failure
        assert self._flight is None, "rank 0 saves when nothing is in flight"
        plan = reports[0]["plan"]
        attempt = attempt or replace(read_plan(plan, step=facts.step), weight_codec=plan["weight_codec"])
        if any(r["changed"] for r in reports):
            attempt = as_base(attempt)  # a delta cannot bring fields that its parent's rows do not have
        assert prepared is not None
        self._tell_if_steps_go_back(facts.step)
        if attempt.kind == "delta":
            self._tell_of_whole_tables(prepared.tables)
        flight = Flight(attempt, SaveHandle(facts.step, attempt.seq), prepared.shards, late=late, last=self.call.last)
        flight.chain_length = 1 if attempt.parent is None else plan["chain_length"]
        try:
            content = self._snapshots.take(prepared, base=attempt.kind == "base")
            return self._hand_over(flight, content, begun)
        except BaseException:  # also KeyboardInterrupt, anywhere
            if not flight.handed_over:
                self._flight = None
                self._tracker.tell_first_touches(None)
                self._tracker.give_back()
            raise

    def _tell_if_steps_go_back(self, step: int) -> None:
        """It is allowed, since a run may go back by means of its own, and mostly a counter that begins anew with each
        epoch."""
        if self._rank == 0 and self._last_step is not None and step < self._last_step:
            log.warning(
                "step %d is saved after step %d, with no resume between them: of equal steps "
                "resume_from_checkpoint(step=...) takes the one saved last. Count steps through all epochs",
                step, self._last_step,
            )  # fmt: skip
        self._last_step = step

    def _tell_of_whole_tables(self, tables: Sequence[Table]) -> None:
        """Once, at the first delta: it is as large as a base, for a reason that is easily missed."""
        if self._told_of_whole_tables:
            return
        self._told_of_whole_tables = True
        found: dict[str, list[Shard]] = {}
        for table in tables:
            is_large = table.shard.rows * table.shard.row_bytes >= _WORTH_A_WORD
            if table.whole_because and is_large and not (table.replicated and self._rank):
                found.setdefault(table.whole_because, []).append(table.shard)
        for why, shards in found.items():
            names = ", ".join(shard.table for shard in shards[:_NAMED]) + (", ..." if len(shards) > _NAMED else "")
            log.warning(
                "every delta carries all rows of %d tables (%s; %s): %s",
                len(shards), names, size(sum(shard.rows * shard.row_bytes for shard in shards)), why,
            )  # fmt: skip

    def _shards_of_parent(self) -> tuple[Shard, ...]:
        """Those of the base that the next delta builds on. If the one in flight has failed, the next save is a base."""
        flight = self._flight
        return flight.shards if flight is not None and flight.attempt.kind == "base" else self._parent_shards

    def _hand_over(self, flight: Flight, content: Content, begun: float) -> SaveHandle:
        self._flight = flight
        flight.stall_seconds = self._clock() - begun
        flight.handed_over = True  # before it is: whoever is interrupted here must not touch its memory again
        self._background.submit(flight, content)
        return flight.handle

    @staticmethod
    def _failed(report: Report) -> bool:
        outcome = report["outcome"]
        return outcome is not None and outcome["unraised"]

    def _outcome(self) -> Report | None:
        """How the attempt before ended. Kept until a meeting has taken place."""
        flight = self._flight
        if flight is None or self._rank != 0 or not (flight.handle.done() or flight.written.is_set()):
            return None
        flight.written.wait()  # at once: the background says so a moment after the handle does
        if self._told is None:
            assert flight.verdict is not None
            self.planner.settle(flight.attempt, flight.verdict)
            self._told = {
                "attempt": flight.attempt.attempt,
                "committed": flight.verdict.committed is not None,
                "error": written_error(flight.verdict.error),
            }
        return {**self._told, "unraised": flight.handle._error is not None and not flight.handle._raised}

    def _take_in(self, host: Report) -> None:
        """Settle by rank 0's word; raise what it says that all ranks raise."""
        flight = self._flight
        self.call = Call(host["go"], host["next"], host.get("last", False))
        if host["outcome"] is not None:
            self._settle(host["outcome"])
        if host["outcome"] is not None and host["outcome"]["unraised"]:
            if flight is not None and (error := flight.handle._unraised()) is not None:
                raise error
            raise make_error(*host["outcome"]["error"])
        if host["lost"] is not None:
            raise self.planner.lost or make_error("ConflictError", host["lost"])

    def _settle(self, outcome: Mapping[str, Any] | None) -> None:
        """Drop or keep the frozen marks by the outcome of the attempt before (I5)."""
        flight = self._flight
        if flight is None:
            return
        if flight.interrupt.is_set():
            # It was told before; this outcome is of an attempt that went on without this rank.
            if not flight.written.is_set():
                return
            outcome = flight.outcome
        flight.outcome = outcome
        committed = outcome is not None and outcome["committed"] and outcome["attempt"] == flight.attempt.attempt
        if not flight.handle.done():
            self._end_waiting(flight, outcome, committed=committed)
        self._tracker.tell_first_touches(None)
        if committed:
            self._durable_step = flight.attempt.step
        if committed and flight.attempt.kind == "base":
            self._parent_shards = flight.shards
        # Interrupted from here on, the marks are still frozen and nothing is in flight: the next save gives them back.
        self._flight = self._told = None
        if committed and flight.attempt.moves_parent:
            self._tracker.confirm()
        else:
            self._tracker.give_back()

    def _end_waiting(self, flight: Flight, outcome: Mapping[str, Any] | None, *, committed: bool) -> None:
        """Rank 0 has told the outcome before this rank has found it in the store."""
        flight.interrupt.set()
        let_go = flight.written.wait(self._settings.vote_timeout)
        if committed:
            try:
                flight.handle._finish(self._repository.manifest(flight.attempt.seq).info(), None)
            except CheckpointError as cause:
                flight.handle._finish(None, cause)
        else:
            error = outcome["error"] if outcome is not None else None
            text = f"save of step {flight.attempt.step} (seq {flight.attempt.seq}) failed"
            flight.handle._finish(None, make_error(*error) if error else SaveError(text))
        if not let_go:
            flight.handle._raised = True
            raise self._still_writing(flight)

    def _await_background(self, timeout: float) -> None:
        """Raises SaveError where it does not let go of the snapshot in time, though the outcome is known."""
        if self._flight is not None and not self._flight.written.wait(timeout):
            raise self._still_writing(self._flight)

    def _settle_late(self) -> None:
        """Settle an attempt whose outcome was told while this rank was still writing.

        Raises:
            SaveError: it still is. The snapshot's memory is in use, so that no rank can save.
        """
        flight = self._flight
        if flight is not None and flight.interrupt.is_set():
            if not flight.written.is_set():
                raise self._still_writing(flight)
            self._settle(flight.outcome)

    def _still_writing(self, flight: Flight) -> SaveError:
        return SaveError(
            f"rank {self._rank} is still writing seq {flight.attempt.seq} (step {flight.attempt.step}), which is "
            f"settled without it; does {self._repository.store.url} answer?"
        )

    def close(self, timeout: float) -> None:
        """Drain and stop.

        Raises:
            SaveError: what is in flight failed, or is not done in time.
        """
        try:
            self.drain(timeout)
            self._await_background(timeout)
        except BaseException:
            # From now on nobody watches the rows: what is still being streamed must not be committed.
            for index in range(len(self._flight.shards) if self._flight is not None else 0):
                self._tracker.mark_all(index)
            raise
        self._background.stop()
        self._snapshots.release()
        self.raise_failure()
