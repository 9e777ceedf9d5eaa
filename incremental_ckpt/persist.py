"""The background half of a save: encode, write packs, vote, commit, tell the outcome, look at what the store now holds.

It must not know models, trackers or devices, and runs no collective: ranks meet in the store only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from incremental_ckpt.codecs import Codec
from incremental_ckpt.errors import CheckpointError, ConflictError, NotFoundError, SaveError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import (
    Entry,
    Lineage,
    Manifest,
    Outcome,
    Pack,
    RankManifest,
    RankRef,
    RowSet,
    ShardEntries,
    Span,
    State,
    StateTensor,
    Totals,
)
from incremental_ckpt.format.pack import PackBuilder
from incremental_ckpt.format.rowset import encode_rows
from incremental_ckpt.format.sealed import digest_of
from incremental_ckpt.model import WEIGHT, CheckpointRef, Kind, Shard
from incremental_ckpt.repository import Repository
from incremental_ckpt.settings import Settings
from incremental_ckpt.snapshot import Part, StateCopy, StateTensorCopy
from incremental_ckpt.storage.base import Buffer

# safetensors has no complex dtypes; their bytes are stored as they are.
_AS_BYTES = frozenset({"complex64", "complex128"})


@dataclass(frozen=True)
class Attempt:
    """What all ranks of one save agree on.

    Attributes:
        next_parent: what the next delta counts from if this attempt commits; None: this very checkpoint.
    """

    seq: int
    attempt: str
    kind: Kind
    parent: CheckpointRef | None
    next_parent: CheckpointRef | None
    step: int
    epoch: int | None
    loss: float | None
    metrics: Mapping[str, float]
    job: str
    lineage: Sequence[Lineage]
    environment: Mapping[str, Any]

    @property
    def moves_parent(self) -> bool:
        return self.next_parent is None


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended.

    Attributes:
        committed: the manifest, if this attempt committed.
        error: what went wrong otherwise.
        newest: the newest checkpoint of this job in the store, as the look after the attempt showed it; None where
            there is none.
        looked: whether the look succeeded; if not, the next attempt looks first.
    """

    committed: Manifest | None
    error: CheckpointError | None
    newest: Manifest | None
    looked: bool


class RankWriter:
    """Packs, entries and finally the vote of one rank for one attempt. Background thread."""

    def __init__(
        self,
        repository: Repository,
        attempt: Attempt,
        shards: Sequence[Shard],
        codecs: Mapping[str, Codec],
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self._repository = repository
        self._attempt = attempt
        self._shards = shards
        self._codecs = codecs
        self._rank = rank
        self._world_size = world_size
        self._packs: list[Pack] = []
        self._rowsets: list[list[RowSet]] = [[] for _ in shards]
        self._entries: list[list[Entry]] = [[] for _ in shards]
        # Old values that a stream spilled hold over what was read from the table, so they come last (format.md section
        # 6).
        self._overriding: list[list[Entry]] = [[] for _ in shards]
        self._parts = [0] * len(shards)
        self._weights = 0

    def add_rows(self, packful: Iterable[Part], *, overriding: bool = False) -> None:
        """Write one pack. The parts' arrays are not used after the call."""
        builder = PackBuilder()
        pending: list[Callable[[list[Span]], None]] = []
        for part in packful:
            self._add_part(builder, part, self._overriding if overriding else self._entries, pending)
        spans = self._put(builder)
        for fill in pending:
            fill(spans)

    def _add_part(
        self, builder: PackBuilder, part: Part, entries: list[list[Entry]], pending: list[Callable[[list[Span]], None]]
    ) -> None:
        shard, number = self._shards[part.table], self._parts[part.table]
        self._parts[part.table] += 1
        rows: range | int
        if isinstance(part.rows, range):
            rows = part.rows
        else:
            rows = len(self._rowsets[part.table])
            raw = encode_rows(part.rows)
            at = builder.add(f"{part.table}.rows.{number}", "uint8", (len(raw),), [raw])
            count = len(part.rows)
            self._rowsets[part.table].append(RowSet(count, Span(0, "", 0, 0, "")))

            def fill_rows(spans: list[Span], place: int = rows, table: int = part.table) -> None:
                self._rowsets[table][place] = RowSet(count, spans[at])

            pending.append(fill_rows)
        for field, values in zip(shard.fields, part.fields, strict=True):
            codec = self._codecs[WEIGHT if field.name == WEIGHT else "optimizer"]
            records = codec.encode(values, field)
            typed = codec.name == "raw" and field.dtype not in _AS_BYTES
            dtype, shape = (field.dtype, (len(records), field.width)) if typed else ("uint8", records.shape)
            index = builder.add(f"{part.table}.{field.name}.{number}", dtype, shape, [_bytes_of(records)])

            def fill(
                spans: list[Span],
                index: int = index,
                field: str = field.name,
                codec: str = codec.name,
                size: int = records.shape[1],
            ) -> None:
                entries[part.table].append(Entry(field, codec, size, rows, spans[index]))

            pending.append(fill)
        if isinstance(part.rows, range) or entries is self._entries:
            self._weights += len(part.rows)

    def add_state(self, copies: Sequence[StateCopy], pack_bytes: int) -> tuple[State, ...]:
        """Write the state's tensors, in packs of about ``pack_bytes``."""
        spans: dict[tuple[int, int], Span] = {}
        builder, names = PackBuilder(), list[tuple[int, int]]()
        for at, copy in enumerate(copies):
            for index, tensor in enumerate(copy.tensors):
                if names and builder.nbytes + tensor.bytes.nbytes > pack_bytes:
                    spans.update(zip(names, self._put(builder), strict=True))
                    builder, names = PackBuilder(), []
                as_bytes = tensor.dtype in _AS_BYTES
                dtype, shape = ("uint8", (tensor.bytes.nbytes,)) if as_bytes else (tensor.dtype, tensor.shape)
                builder.add(f"{copy.name}.{index}", dtype, shape, [tensor.bytes])
                names.append((at, index))
        if names:
            spans.update(zip(names, self._put(builder), strict=True))

        def tensors(at: int, copied: tuple[StateTensorCopy, ...]) -> tuple[StateTensor, ...]:
            return tuple(StateTensor(t.dtype, t.shape, spans[at, i]) for i, t in enumerate(copied))

        return tuple(State(c.name, c.tree, tensors(at, c.tensors)) for at, c in enumerate(copies))

    def _put(self, builder: PackBuilder) -> list[Span]:
        index = len(self._packs)
        key = layout.pack_key(self._attempt.seq, self._attempt.attempt, self._rank, index)
        finished = builder.finish(key, index)
        self._repository.store.put(key, finished.parts)
        self._packs.append(finished.pack)
        return finished.spans

    def vote(self, state: tuple[State, ...]) -> tuple[RankRef, int, int]:
        """Write the rank manifest.

        Returns:
            What the manifest names, how many rows were written, and how many bytes in all.
        """
        shards = tuple(
            ShardEntries(shard, tuple(rowsets), (*entries, *overriding))
            for shard, rowsets, entries, overriding in zip(
                self._shards, self._rowsets, self._entries, self._overriding, strict=True
            )
        )
        ref = self._put_vote("ok", "", shards, state)
        return ref, self._weights, ref.size + sum(p.size for p in self._packs)

    def vote_failed(self, error: BaseException) -> None:
        """A failure is a vote too: the other ranks learn of it without waiting for a timeout."""
        self._packs = []
        self._put_vote("failed", f"{type(error).__name__}: {error}", (), ())

    def _put_vote(self, vote: str, error: str, shards: tuple[ShardEntries, ...], state: tuple[State, ...]) -> RankRef:
        manifest = RankManifest(
            self._attempt.seq, self._attempt.attempt, self._rank, self._world_size,
            "ok" if vote == "ok" else "failed", error, tuple(self._packs), shards, state,
        )  # fmt: skip
        raw = manifest.to_bytes()
        key = layout.rank_manifest_key(self._attempt.seq, self._attempt.attempt, self._rank)
        self._repository.store.put(key, [raw])
        return RankRef(key, len(raw), digest_of(raw))


def _bytes_of(records: np.ndarray) -> Buffer:
    return np.ascontiguousarray(records).reshape(-1).data


@dataclass(frozen=True)
class Content:
    """What one rank writes: its shards, its state, and its rows in packfuls (each with whether it overrides the
    others).

    ``end`` releases what the packfuls stand on, whatever happened.
    """

    shards: Sequence[Shard]
    state: Sequence[StateCopy]
    packfuls: Iterable[tuple[list[Part], bool]]
    end: Callable[[], None]


class Persister:
    """Carries attempts out, one after another.

    Args:
        codecs: by ``weight`` and ``optimizer``.
    """

    def __init__(
        self,
        repository: Repository,
        codecs: Mapping[str, Codec],
        settings: Settings,
        *,
        rank: int = 0,
        world_size: int = 1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._repository = repository
        self._codecs = codecs
        self._settings = settings
        self._rank = rank
        self._world_size = world_size
        self._clock = clock
        self._sleep = sleep
        self._now = now

    def persist(self, attempt: Attempt, content: Content) -> Verdict:
        """Write, vote and (rank 0) commit. Never raises a CheckpointError: the verdict says what went wrong."""
        writer = RankWriter(
            self._repository, attempt, content.shards, self._codecs, rank=self._rank, world_size=self._world_size
        )
        error: CheckpointError | None = None
        mine: tuple[RankRef, int, int] | None = None
        try:
            try:
                if self._rank == 0:
                    self._repository.create()
                for packful, overriding in content.packfuls:
                    writer.add_rows(packful, overriding=overriding)
                state = writer.add_state(content.state, self._settings.pack_bytes)
            finally:
                content.end()
            mine = writer.vote(state)
        except Exception as cause:  # whatever it is, it fails this save and no other
            error = _save_error(attempt, cause)
            self._report_failure(writer, cause)
        if self._rank == 0:
            return self._decide(attempt, mine, error)
        return self._await_outcome(attempt, error)

    def _report_failure(self, writer: RankWriter, cause: Exception) -> None:
        if self._world_size == 1:
            return
        try:
            writer.vote_failed(cause)
        except CheckpointError:
            pass  # the store is what failed: rank 0 misses the vote and its timeout ends the attempt

    def _decide(
        self, attempt: Attempt, mine: tuple[RankRef, int, int] | None, error: CheckpointError | None
    ) -> Verdict:
        committed: Manifest | None = None
        if error is None and mine is not None:
            try:
                committed = self._repository.commit(self._manifest(attempt, mine))
            except Exception as failure:
                error = failure if isinstance(failure, (SaveError, ConflictError)) else _save_error(attempt, failure)
        verdict = self._look(attempt, committed, error)
        if self._world_size > 1:
            self._tell(attempt, verdict)
        return verdict

    def _manifest(self, attempt: Attempt, mine: tuple[RankRef, int, int]) -> Manifest:
        refs, rows, size, table_rows = [mine[0]], mine[1], mine[2], 0
        for rank in range(self._world_size):
            if rank != self._rank:
                ref, vote = self._await_vote(attempt, rank)
                refs.append(ref)
                size += ref.size + sum(p.size for p in vote.packs)
                rows += sum(_rows(s, s.rowsets, e) for s in vote.shards for e in s.entries if e.field == WEIGHT)
            else:
                vote = self._repository.rank_manifest(mine[0])
            table_rows += sum(s.shard.rows for s in vote.shards if s.shard.col_start == 0)
        return Manifest(
            seq=attempt.seq, step=attempt.step, epoch=attempt.epoch, loss=attempt.loss, metrics=dict(attempt.metrics),
            kind=attempt.kind, parent=attempt.parent, next_parent=attempt.next_parent,
            job=attempt.job, attempt=attempt.attempt,
            lineage=tuple(attempt.lineage), created=self._now(), world_size=self._world_size, ranks=tuple(refs),
            totals=Totals(rows, table_rows, size), environment=attempt.environment,
        )  # fmt: skip

    def _await_vote(self, attempt: Attempt, rank: int) -> tuple[RankRef, RankManifest]:
        key = layout.rank_manifest_key(attempt.seq, attempt.attempt, rank)
        raw = self._await_object(key, f"rank {rank} has not voted on seq {attempt.seq} (step {attempt.step})")
        vote = RankManifest.from_bytes(raw, key)
        if vote.vote != "ok":
            raise SaveError(
                f"save of step {attempt.step} failed on rank {rank}: {vote.error}. Its rows go into the next save"
            )
        return RankRef(key, len(raw), digest_of(raw)), vote

    def _await_object(self, key: str, missing: str) -> bytes:
        deadline = self._clock() + self._settings.vote_timeout
        pause = 0.005
        while True:
            try:
                return bytes(self._repository.store.get(key))
            except NotFoundError:
                if self._clock() > deadline:
                    raise SaveError(
                        f"{missing} within {self._settings.vote_timeout:g} s. Is it alive, and does it write to the "
                        "same store "
                        f"({self._repository.store.url})?"
                    ) from None
            self._sleep(pause)
            pause = min(pause * 1.5, 0.5)

    def _look(self, attempt: Attempt, committed: Manifest | None, error: CheckpointError | None) -> Verdict:
        """What the store holds now decides what the next attempt counts from, not what this one believes."""
        try:
            newest = self._repository.newest_above(attempt.seq - 1)
        except CheckpointError:
            return Verdict(committed, error, committed, committed is not None)
        if newest is not None and newest.attempt == attempt.attempt:
            # The answer was lost, or the put landed after we had given it up: it is committed all the same.
            return Verdict(newest, None, newest, True)
        if newest is not None and newest.job != attempt.job:
            # Also where a late put of our own holds this number: another job has gone on behind it.
            if committed is None:
                error = self._repository.lost_to(newest, attempt.job)
            newest = None
        return Verdict(committed, error, newest or committed, True)

    def _tell(self, attempt: Attempt, verdict: Verdict) -> None:
        outcome = Outcome(attempt.seq, attempt.attempt, verdict.committed is not None, str(verdict.error or ""))
        try:
            self._repository.store.put(layout.outcome_key(attempt.seq, attempt.attempt), [outcome.to_bytes()])
        except CheckpointError:
            pass  # the others time out, and the next meeting tells them

    def _await_outcome(self, attempt: Attempt, error: CheckpointError | None) -> Verdict:
        key = layout.outcome_key(attempt.seq, attempt.attempt)
        try:
            raw = self._await_object(key, f"rank 0 has not told the outcome of seq {attempt.seq} (step {attempt.step})")
            outcome = Outcome.from_bytes(raw, key)
        except CheckpointError as failure:
            return Verdict(None, error or _save_error(attempt, failure), None, False)
        if not outcome.committed:
            return Verdict(None, error or SaveError(outcome.error), None, False)
        committed = self._repository.manifest(attempt.seq)
        return Verdict(committed, None, committed, True)


def _rows(shard: ShardEntries, rowsets: Sequence[RowSet], entry: Entry) -> int:
    return (
        len(entry.rows)
        if isinstance(entry.rows, range)
        else rowsets[entry.rows].count
        if shard.shard.col_start == 0
        else 0
    )


def _save_error(attempt: Attempt, cause: Exception) -> CheckpointError:
    if isinstance(cause, SaveError):
        return cause
    error = SaveError(
        f"save of step {attempt.step} (seq {attempt.seq}) failed and committed nothing: {cause}. Its rows stay marked "
        "and go into the next save"
    )
    error.__cause__ = cause
    return error


def lower_priority() -> None:
    """Make the calling thread run only where the system is idle (Linux SCHED_IDLE), so that training keeps its
    cores."""
    if not hasattr(os, "SCHED_IDLE"):
        return
    try:
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        pass  # not permitted in some sandboxes: the thread then runs at normal priority
