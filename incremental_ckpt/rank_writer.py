"""What one rank writes for one attempt: packs of its rows and state, and its vote.

It must not know the other ranks, nor whether the attempt commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from incremental_ckpt.codecs import Codec, encode_values
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import (
    Entry,
    Lineage,
    Pack,
    RankManifest,
    RankRef,
    RowSet,
    ShardEntries,
    Span,
    State,
    StateTensor,
    VoteFacts,
)
from incremental_ckpt.format.pack import PackBuilder
from incremental_ckpt.format.rowset import encode_rows
from incremental_ckpt.format.sealed import digest_of
from incremental_ckpt.model import WEIGHT, CheckpointRef, Field, Kind, Table
from incremental_ckpt.repository import Repository
from incremental_ckpt.snapshot import Part, StateCopy, StateTensorCopy
from incremental_ckpt.storage.base import Buffer

# safetensors has no complex dtypes; their bytes are stored as they are.
_AS_BYTES = frozenset({"complex64", "complex128"})

_Pending = list[Callable[[list[Span]], None]]
"""What waits for the spans of a pack until it is written."""


@dataclass(frozen=True)
class Attempt:
    """What all ranks of one save agree on.

    Attributes:
        next_parent: what the next delta counts from if this attempt commits; None: this very checkpoint.
        weight_codec: of the tables' weights, where it is chosen save by save.
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
    weight_codec: str | None = None

    @property
    def moves_parent(self) -> bool:
        return self.next_parent is None


@dataclass(frozen=True)
class Content:
    """What one rank writes: its tables, its state, and its rows in packfuls (each with whether it overrides the
    others).

    ``end`` releases what the packfuls stand on, whatever happened.
    """

    tables: Sequence[Table]
    state: Sequence[StateCopy]
    packfuls: Iterable[tuple[list[Part], bool]]
    end: Callable[[], None]


@dataclass(frozen=True)
class Ballot:
    """What the manifest says of one rank's vote.

    Attributes:
        rows: rows that it carries.
        table_rows: rows that its tables have; of what several ranks hold, counted by one of them.
        bytes: of its packs and the rank manifest.
    """

    ref: RankRef
    rows: int
    table_rows: int
    bytes: int


def ballot_of(vote: VoteFacts, raw: bytes) -> Ballot:
    ref = RankRef(vote.key, len(raw), digest_of(raw), vote.shared)
    return Ballot(ref, vote.rows, vote.table_rows, len(raw) + vote.pack_bytes)


class RankWriter:
    """Packs, entries and finally the vote of one rank for one attempt. Background thread."""

    def __init__(
        self,
        repository: Repository,
        attempt: Attempt,
        tables: Sequence[Table],
        codecs: Mapping[str, Codec],
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self._repository = repository
        self._attempt = attempt
        self._shards = [t.shard for t in tables]
        self._replicated = [t.replicated for t in tables]
        self._codecs = codecs
        self._rank = rank
        self._world_size = world_size
        self._packs: list[Pack] = []
        self._rowsets: list[list[RowSet]] = [[] for _ in tables]
        self._entries: list[list[Entry]] = [[] for _ in tables]
        # Old values that a stream spilled hold over what was read from the table, so they come last (format.md section
        # 6).
        self._overriding: list[list[Entry]] = [[] for _ in tables]
        self._parts = [0] * len(tables)
        self._rows = 0

    def add_rows(self, packful: Iterable[Part], *, overriding: bool = False) -> None:
        """Write one pack. The parts' arrays are not used after the call."""
        builder = PackBuilder()
        pending: _Pending = []
        for part in packful:
            self._add_part(builder, part, self._overriding if overriding else self._entries, pending)
        spans = self._put(builder)
        for fill in pending:
            fill(spans)

    def _add_part(self, builder: PackBuilder, part: Part, entries: list[list[Entry]], pending: _Pending) -> None:
        shard, number = self._shards[part.table], self._parts[part.table]
        self._parts[part.table] += 1
        rows: range | int
        if isinstance(part.rows, range):
            rows = part.rows
        else:
            rows = self._add_row_set(builder, part.table, f"{part.table}.rows.{number}", part.rows, pending)
        for field, values in zip(shard.fields, part.fields, strict=True):
            asked = self._codecs[WEIGHT if field.name == WEIGHT else "optimizer"].name
            codec, encoded = encode_values(values, asked, field)
            tensor = f"{part.table}.{field.name}.{number}"
            add = partial(self._add_entry, builder, field, entries[part.table], pending)
            add(tensor, codec, encoded.records, rows)
            if encoded.held is not None:
                left = np.flatnonzero(~encoded.held)
                ids = left + part.rows.start if isinstance(part.rows, range) else part.rows[left]
                beside = self._add_row_set(builder, part.table, f"{tensor}.raw.rows", ids, pending)
                add(f"{tensor}.raw", "raw", values[left], beside)
        if entries is self._entries and shard.col_start == 0:
            self._rows += len(part.rows)

    def _add_row_set(self, builder: PackBuilder, table: int, tensor: str, ids: np.ndarray, pending: _Pending) -> int:
        """The row set's number; its span is filled in once the pack is written."""
        place, count, raw = len(self._rowsets[table]), len(ids), encode_rows(ids)
        at = builder.add(tensor, "uint8", (len(raw),), [raw])
        self._rowsets[table].append(RowSet(count, Span(0, "", 0, 0, "")))

        def fill(spans: list[Span]) -> None:
            self._rowsets[table][place] = RowSet(count, spans[at])

        pending.append(fill)
        return place

    @staticmethod
    def _add_entry(
        builder: PackBuilder,
        field: Field,
        entries: list[Entry],
        pending: _Pending,
        tensor: str,
        codec: str,
        records: np.ndarray,
        rows: range | int,
    ) -> None:
        typed = codec == "raw" and field.dtype not in _AS_BYTES
        dtype, shape = (field.dtype, (len(records), field.width)) if typed else ("uint8", records.shape)
        at = builder.add(tensor, dtype, shape, [_bytes_of(records)])
        size = records.shape[1]
        pending.append(lambda spans: entries.append(Entry(field.name, codec, size, rows, spans[at])))

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

    def vote(self, state: tuple[State, ...]) -> Ballot:
        """Write the rank manifest."""
        shards = tuple(
            ShardEntries(shard, tuple(rowsets), (*entries, *overriding), replicated)
            for shard, replicated, rowsets, entries, overriding in zip(
                self._shards, self._replicated, self._rowsets, self._entries, self._overriding, strict=True
            )
        )
        return self._put_vote("ok", "", shards, state)

    def vote_failed(self, error: BaseException) -> None:
        """A failure is a vote too: the other ranks learn of it without waiting for a timeout."""
        self._packs = []
        self._put_vote("failed", f"{type(error).__name__}: {error}", (), ())

    def _put_vote(self, vote: str, error: str, shards: tuple[ShardEntries, ...], state: tuple[State, ...]) -> Ballot:
        manifest = RankManifest(
            self._attempt.seq, self._attempt.attempt, self._rank, self._world_size,
            "ok" if vote == "ok" else "failed", error, tuple(self._packs), shards, state, self._rows,
        )  # fmt: skip
        raw = manifest.to_bytes()
        key = layout.rank_manifest_key(self._attempt.seq, self._attempt.attempt, self._rank)
        self._repository.store.put(key, [raw])
        return ballot_of(VoteFacts.from_bytes(raw, key), raw)


def _bytes_of(records: np.ndarray) -> Buffer:
    return np.ascontiguousarray(records).reshape(-1).data
