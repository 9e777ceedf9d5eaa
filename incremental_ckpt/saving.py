"""One save after another: plan, freeze, copy (the stall), hand over to the background, settle the marks by the outcome.

It must not know when saves are due; it decides which number, parent and marks, and nothing of it from memory of what
was written.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from incremental_ckpt.codecs import Codec
from incremental_ckpt.coordinator import Coordinator
from incremental_ckpt.errors import CheckpointError, ConflictError, SaveError
from incremental_ckpt.events import Event, FailureEvent, SaveEvent
from incremental_ckpt.format.layout import new_id
from incremental_ckpt.format.manifest import Lineage, Manifest
from incremental_ckpt.model import CheckpointInfo, CheckpointRef, ModelAdapter, Shard, Table
from incremental_ckpt.persist import Attempt, Content, Persister, Verdict, lower_priority
from incremental_ckpt.policy import KindPolicy, choose_kind
from incremental_ckpt.repository import Repository
from incremental_ckpt.repository.core import lineage_after, ref_of
from incremental_ckpt.settings import Settings
from incremental_ckpt.snapshot import HostArena, RowCopies, StateCopy, copied_bytes, flatten_state
from incremental_ckpt.stream import RowStream
from incremental_ckpt.tracker import Tracker

log = logging.getLogger("incremental_ckpt")


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
        """
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
        self._info, self._error = info, error
        self._finished.set()

    def _unraised(self) -> CheckpointError | None:
        """The failure, if nobody has been told of it; whoever asks has been."""
        if not self.done() or self._raised or self._error is None:
            return None
        self._raised = True
        return self._error


@dataclass(frozen=True)
class Facts:
    """What the caller says of a save."""

    step: int
    epoch: int | None
    loss: float | None
    metrics: Mapping[str, float]


@dataclass
class _Flight:
    """The one attempt that may be under way."""

    attempt: Attempt
    handle: SaveHandle
    shards: tuple[Shard, ...]
    stall_seconds: float = 0.0
    verdict: Verdict | None = None


class Background:
    """One thread at idle priority that carries out jobs in order."""

    def __init__(self, *, idle: bool) -> None:
        self._idle = idle
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ickpt-persist", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        if self._idle:
            lower_priority()
        while (job := self._jobs.get()) is not None:
            job()

    def stop(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


class Saver:
    """Saves of one job. All methods are called from the training thread."""

    def __init__(
        self,
        repository: Repository,
        adapter: ModelAdapter,
        tracker: Tracker,
        coordinator: Coordinator,
        codecs: Mapping[str, Codec],
        settings: Settings,
        *,
        job: str,
        environment: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        background: Background | None = None,
    ) -> None:
        self._repository = repository
        self._adapter = adapter
        self._tracker = tracker
        self._coordinator = coordinator
        self._settings = settings
        self._job = job
        self._environment = environment
        self._clock = clock
        self._persister = Persister(
            repository, codecs, settings, rank=coordinator.rank, world_size=coordinator.world_size, clock=clock
        )
        self._background = background or Background(idle=settings.idle_priority)
        self._arena = HostArena(pinned=torch.cuda.is_available())
        self._flight: _Flight | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lost: ConflictError | None = None
        self._lineage: tuple[Lineage, ...] | None = None
        self._newest_seq = 0
        self._parent: CheckpointRef | None = None
        self._parent_shards: tuple[Shard, ...] = ()
        self._must_base = True
        self._unseen = False
        self._shares: list[float] = []
        self._chain_lengths: dict[int, int] = {}

    def begin_after(
        self, newest: Manifest | None, newest_seq: int, resumed: Sequence[Manifest], *, complete: bool
    ) -> None:
        """Start the job's own numbers.

        Args:
            newest: the newest readable checkpoint in the store.
            newest_seq: the highest number, readable or not.
            resumed: the chain that was replayed, base first; empty if nothing was resumed.
            complete: the model is exactly that checkpoint (strict), so that deltas may count from it.
        """
        self._settle()  # the marks of the save before: they go with the reset below
        source = resumed[-1] if resumed else None
        lineage = tuple(lineage_after(newest, self._job, source.seq if source else 0))
        self._lineage = (*lineage[:-1], Lineage(self._job, newest_seq + 1, lineage[-1].resumed))
        self._newest_seq = newest_seq
        self._parent = ref_of(source) if source else None
        self._parent_shards = tuple(t.shard for t in self._adapter.tables())
        # A branch starts with a base: a delta's parent would lie behind numbers of another branch, which prune may
        # drop.
        self._must_base = source is None or not complete or source.seq != newest_seq
        deltas = [m for m in resumed if m.kind == "delta"]
        self._shares = [m.totals.rows / max(1, m.totals.table_rows) for m in deltas]
        self._chain_lengths = {m.seq: i + 1 for i, m in enumerate(resumed)}
        self._tracker.reset()

    def must_start_over(self) -> None:
        """Rows may be about to change unmarked (a resume that may fail half-way): the next save is a base."""
        self._settle()
        self._must_base = True

    @property
    def begun(self) -> bool:
        return self._lineage is not None

    @property
    def busy(self) -> bool:
        return self._flight is not None and not self._flight.handle.done()

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        happened = []
        while not self._events.empty():
            happened.append(self._events.get())
        return happened

    def raise_failure(self) -> None:
        """Raise the failure of the last save, once, if nobody has been told of it."""
        if self._flight is not None and (error := self._flight.handle._unraised()) is not None:
            raise error

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

    def save(self, facts: Facts, kind: KindPolicy, extra_state: Callable[[], Mapping[str, Any]]) -> SaveHandle:
        """Freeze and copy, then hand over. Nothing is in flight when this is called.

        Raises:
            ConflictError: another job has gone on; this one can save no more.
            SaveError: nothing was saved; the rows stay marked.
        """
        begun = self._clock()
        self._settle()
        if self._lost is not None:
            raise self._lost
        try:
            if not self.begun:
                newest = self._repository.newest()
                self.begin_fresh(newest)
            elif self._unseen:
                self._adopt(self._repository.newest_of(self._job, self._newest_seq))
                self._unseen = False
            tables = self._adapter.tables()
            live_state = {**self._adapter.state(), **extra_state()}
            attempt = self._plan(facts, kind, tables)
            content = self._freeze_and_copy(attempt, tables, live_state)
        except SaveError:
            raise
        except CheckpointError as cause:
            raise SaveError(f"save of step {facts.step} failed before anything was written: {cause}") from cause
        flight = _Flight(attempt, SaveHandle(facts.step, attempt.seq), tuple(content.shards))
        self._flight = flight
        flight.stall_seconds = self._clock() - begun
        handed_over = self._clock()
        self._background.submit(lambda: self._carry_out(flight, content, handed_over))
        return flight.handle

    def begin_fresh(self, newest: Manifest | None) -> None:
        """Begin without a resume; what the store holds is left alone, and the numbers go on behind it."""
        if newest is not None:
            log.warning(
                "%s already holds checkpoints up to seq %d (step %d), and this job did not resume from them: it "
                "starts with a base of its own",
                self._repository.store.url, newest.seq, newest.step,
            )  # fmt: skip
        marked = newest.seq if newest is not None else 0
        self.begin_after(newest, marked, (), complete=False)

    def _plan(self, facts: Facts, kind: KindPolicy, tables: Sequence[Table]) -> Attempt:
        choice = choose_kind(kind, self._shares)
        fields_changed = tuple(t.shard for t in tables) != self._parent_shards
        base = choice.base or self._must_base or self._parent is None or fields_changed
        assert self._lineage is not None
        return Attempt(
            seq=self._newest_seq + 1, attempt=new_id(), kind="base" if base else "delta",
            parent=None if base else self._parent,
            next_parent=None if base or choice.moves_parent else self._parent,
            step=facts.step, epoch=facts.epoch, loss=facts.loss, metrics=facts.metrics,
            job=self._job, lineage=self._lineage, environment=self._environment,
        )  # fmt: skip

    def _freeze_and_copy(self, attempt: Attempt, tables: Sequence[Table], live_state: Mapping[str, Any]) -> Content:
        flat = flatten_state(live_state)
        base = attempt.kind == "base"
        rows = self._tracker.freeze(everything=base)
        try:
            streamed = self._streamed(tables, rows, base=base)
            nothing = torch.empty(0, dtype=torch.int64)
            copied = [nothing if s else r for r, s in zip(rows, streamed, strict=True)]
            self._arena.reserve(flat.arena_bytes + copied_bytes(tables, copied))
            copies = RowCopies(tables, copied, self._arena)
            stream: RowStream | None = None
            if any(streamed):
                stream = RowStream(
                    tables, [r if s else nothing for r, s in zip(rows, streamed, strict=True)],
                    pack_bytes=self._settings.pack_bytes, entry_bytes=self._settings.entry_bytes,
                    limit=self._settings.preimage_bytes,
                )  # fmt: skip
                self._tracker.tell_first_touches(stream, self._tracker.frozen_interval(everything=base))
            state = flat.copy(self._arena)
        except BaseException:
            self._tracker.tell_first_touches(None)
            self._tracker.give_back()
            raise
        return self._content(tables, state, copies, stream)

    def _streamed(self, tables: Sequence[Table], rows: Sequence[torch.Tensor | None], *, base: bool) -> list[bool]:
        """Which tables are streamed: those whose updates are announced, if the stall should not copy them."""
        settings = self._settings
        large = base or copied_bytes(tables, rows) > settings.snapshot_bytes
        return [large and settings.stream and t.tracked for t in tables]

    def _content(
        self, tables: Sequence[Table], state: Sequence[StateCopy], copies: RowCopies, stream: RowStream | None
    ) -> Content:
        settings = self._settings

        def packfuls() -> Any:
            for packful in copies.packfuls(settings.pack_bytes, settings.entry_bytes):
                yield packful, False
            if stream is not None:
                yield from stream.packfuls()

        def end() -> None:
            if stream is not None:
                stream.end()

        return Content([t.shard for t in tables], state, packfuls(), end)

    def _carry_out(self, flight: _Flight, content: Content, handed_over: float) -> None:
        attempt = flight.attempt
        try:
            verdict = self._persister.persist(attempt, content)
        except BaseException as cause:  # also what no save should raise: nobody may wait for this save for ever
            failure = SaveError(f"save of step {attempt.step} (seq {attempt.seq}) broke off: {cause!r}")
            failure.__cause__ = cause
            verdict = Verdict(None, failure, None, False)
        flight.verdict = verdict
        if verdict.committed is not None:
            info = verdict.committed.info()
            base_length = 0 if attempt.parent is None else self._chain_lengths.get(attempt.parent.seq, 1)
            event = SaveEvent(
                info.seq, info.step, info.epoch, info.kind, info.rows, info.table_rows, info.bytes,
                flight.stall_seconds, self._clock() - handed_over, base_length + 1,
            )  # fmt: skip
            log.info(
                "saved step %d as seq %d: %s, %d of %d rows (%.2f %%), %.1f MB, stall %.1f ms, durable after %.2f s, "
                "chain of %d",
                event.step, event.seq, event.kind, event.rows, event.table_rows, 100 * event.share, event.bytes / 1e6,
                1e3 * event.stall_seconds, event.persist_seconds, event.chain_length,
            )  # fmt: skip
            self._events.put(event)
            flight.handle._finish(info, None)
            return
        error = verdict.error or SaveError(f"save of step {attempt.step} (seq {attempt.seq}) ended without an outcome")
        log.error("save of step %d (seq %d) failed: %s", attempt.step, attempt.seq, error)
        self._events.put(FailureEvent(attempt.step, attempt.seq, error))
        flight.handle._finish(None, error)

    def _settle(self) -> None:
        """Drop or keep the frozen marks by the outcome of the attempt before (I5), and adopt what the store holds."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        assert flight.verdict is not None, "a flight is settled when it is done"
        self._tracker.tell_first_touches(None)
        verdict, attempt = flight.verdict, flight.attempt
        if verdict.committed is not None and attempt.moves_parent:
            self._tracker.confirm()
        else:
            self._tracker.give_back()
        if isinstance(verdict.error, ConflictError):
            self._lost = verdict.error
        if verdict.committed is not None:
            totals = verdict.committed.totals
            if attempt.kind == "base":
                self._must_base, self._shares = False, []
                self._parent_shards = flight.shards
            else:
                self._shares.append(totals.rows / max(1, totals.table_rows))
            parent = attempt.parent
            self._chain_lengths[attempt.seq] = 1 if parent is None else self._chain_lengths.get(parent.seq, 1) + 1
        self._adopt(verdict.newest)
        self._unseen = not verdict.looked

    def _adopt(self, newest: Manifest | None) -> None:
        """The newest checkpoint of this job in the store says what comes next, also where it landed after we had given
        it up."""
        if newest is None or newest.seq <= self._newest_seq:
            return
        if newest.lineage != self._lineage:
            # A put from before this process's last resume has landed: our history goes on behind it, as a branch.
            assert self._lineage is not None
            self._lineage = (*newest.lineage, Lineage(self._job, newest.seq + 1, self._lineage[-1].resumed))
            self._must_base = True
        self._newest_seq = newest.seq
        self._parent = newest.next_parent or ref_of(newest)

    def close(self, timeout: float) -> None:
        """Drain and stop.

        Raises:
            SaveError: what is in flight failed, or is not done in time.
        """
        try:
            self.drain(timeout)
        except BaseException:
            # From now on nobody watches the rows: what is still being streamed must not be committed.
            for index in range(len(self._parent_shards)):
                self._tracker.mark_all(index)
            raise
        self._background.stop()
        self._arena.release()
        self.raise_failure()
