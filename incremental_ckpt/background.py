"""The background of a save: one thread writes what was handed over, tells how it ended, and lets upkeep follow.

It must not know the training thread's side: marks, meetings, plans.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable

from incremental_ckpt.errors import SaveError
from incremental_ckpt.events import Event, FailureEvent, SaveEvent
from incremental_ckpt.flight import Flight
from incremental_ckpt.persist import Persister, Verdict
from incremental_ckpt.rank_writer import Content
from incremental_ckpt.units import size

log = logging.getLogger("incremental_ckpt")

_LOWEST = 19
"""Nice value."""


class Worker:
    """One thread at low priority that carries out jobs in order."""

    def __init__(self, *, low_priority: bool) -> None:
        self._low_priority = low_priority
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ickpt-persist", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        if self._low_priority:
            _lower_priority()
        while (job := self._jobs.get()) is not None:
            job()

    def stop(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


class Background:
    """Carries out one flight after another.

    Args:
        after_commit: called with the step after each commit on rank 0, unless the job is about to end.
    """

    def __init__(
        self,
        persister: Persister,
        worker: Worker,
        *,
        rank: int,
        clock: Callable[[], float],
        after_commit: Callable[[int], Event | None] | None,
    ) -> None:
        self._persister = persister
        self._worker = worker
        self._rank = rank
        self._clock = clock
        self._after_commit = after_commit
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def submit(self, flight: Flight, content: Content) -> None:
        handed_over = self._clock()
        self._worker.submit(lambda: self._carry_out(flight, content, handed_over))

    def events(self) -> list[Event]:
        """What has happened since the last call. Any thread."""
        happened = []
        while not self._events.empty():
            happened.append(self._events.get())
        return happened

    def stop(self) -> None:
        """Returns when all that was submitted is carried out."""
        self._worker.stop()

    def _carry_out(self, flight: Flight, content: Content, handed_over: float) -> None:
        attempt = flight.attempt
        try:
            verdict = self._persister.persist(attempt, content, flight.interrupt)
        except BaseException as cause:  # also what no save should raise: nobody may wait for this save for ever
            failure = SaveError(f"save of step {attempt.step} (seq {attempt.seq}) broke off: {cause!r}")
            failure.__cause__ = cause
            verdict = Verdict(None, failure, None, False)
        flight.verdict = verdict
        if verdict.committed is not None:
            event = self._event(flight, verdict, self._clock() - handed_over)
            if self._rank == 0:
                log.info(
                    "saved step %d as seq %d: %s, %d of %d rows (%.2f %%), %s, stall %.1f ms, durable after "
                    "%.2f s, chain of %d%s",
                    event.step, event.seq, event.kind, event.rows, event.table_rows, 100 * event.share,
                    size(event.bytes), 1e3 * event.stall_seconds, event.persist_seconds, event.chain_length,
                    f" ({flight.late})" if str(flight.late) else "",
                )  # fmt: skip
            self._events.put(event)
            flight.handle._finish(verdict.committed.info(), None)
        elif verdict.error is not None:
            told = f"save of step {attempt.step} "  # by which most errors begin
            log.error("%s%s", "" if str(verdict.error).startswith(told) else f"{told}failed: ", verdict.error)
            self._events.put(FailureEvent(attempt.step, attempt.seq, verdict.error))
            flight.handle._finish(None, verdict.error)
        flight.written.set()
        may_go_on = self._rank == 0 and verdict.committed is not None and not flight.last
        if self._after_commit is not None and may_go_on:
            self._after_the_commit(attempt.step)

    def _after_the_commit(self, step: int) -> None:
        assert self._after_commit is not None
        try:
            event = self._after_commit(step)
        except Exception:  # it is no part of the save, and the next one needs this thread
            log.exception("what was to happen after the save of step %d has failed", step)
            return
        if event is not None:
            self._events.put(event)

    def _event(self, flight: Flight, verdict: Verdict, persist_seconds: float) -> SaveEvent:
        assert verdict.committed is not None
        info = verdict.committed.info()
        return SaveEvent(
            info.seq, info.step, info.epoch, info.kind, info.rows, info.table_rows, info.bytes,
            flight.stall_seconds, persist_seconds, flight.chain_length,
            flight.late.deferred_steps, flight.late.waited_seconds, flight.late.skipped,
        )  # fmt: skip


def _lower_priority() -> None:
    """Make the calling thread the last in line for a core (on Linux), so that training keeps its cores.

    Not SCHED_IDLE: where the training's threads spin on every core, that is no turn at all (ADR 6).
    """
    if sys.platform == "linux":  # elsewhere it would be the process's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
