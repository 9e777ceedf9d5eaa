"""Records of one table out of a chain, one range of rows after another, in bounded memory: what compaction, export and
comparison share.

It must not know models, ranks or threads, and must not import torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from incremental_ckpt.codecs import decode_records
from incremental_ckpt.codecs.values import bytes_of, numbers_of
from incremental_ckpt.errors import CorruptionError
from incremental_ckpt.format.manifest import Entry, RankManifest, RowSet, ShardEntries, Span
from incremental_ckpt.format.replay import MissingRows, Read, plan_reads
from incremental_ckpt.format.rowset import decode_rows
from incremental_ckpt.model import DTYPE_BYTES, Field, Shard
from incremental_ckpt.repository.read import field_of, read_span

if TYPE_CHECKING:
    from incremental_ckpt.repository.core import Repository

MIB = 1 << 20
_BLOCK = 256 << 10
_LARGEST_KEPT = 4
"""A span is kept in memory if this many of its size fit."""

Ids = npt.NDArray[np.int64]
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class SpanReader:
    """Reads parts of spans, each of which is verified as a whole once; what was read stays in memory while there is
    room.

    Args:
        limit: bytes to keep.

    Attributes:
        bytes_read: from the store so far.
    """

    def __init__(self, repository: Repository, limit: int) -> None:
        self.repository = repository
        self.bytes_read = 0
        self._limit = limit
        self._kept: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._kept_bytes = 0
        self._blocks: dict[tuple[str, int], list[int]] = {}

    def read(self, rank: RankManifest, span: Span, begin: int, end: int) -> memoryview:
        """The bytes ``begin:end`` of a span.

        Raises:
            CorruptionError: they are not what was written.
            NotFoundError: the pack is missing.
        """
        key = (rank.packs[span.pack].key, span.begin)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept[begin:end]
        if key not in self._blocks:
            if (begin, end) == (0, span.size):
                return self.read_whole(rank, span)
            if span.size * _LARGEST_KEPT <= self._limit:
                whole = self.read_whole(rank, span)
                self._blocks[key] = [_digest(whole[at : at + _BLOCK]) for at in range(0, span.size, _BLOCK)]
                self._keep(key, whole)
                return whole[begin:end]
            self._verify(span, key)
        return self._reread(span, key, begin, end)

    def read_whole(self, rank: RankManifest, span: Span, into: memoryview | None = None) -> memoryview:
        self.bytes_read += span.size
        return read_span(self.repository, rank, span, into)

    def _keep(self, key: tuple[str, int], whole: memoryview) -> None:
        self._kept[key] = whole
        self._kept_bytes += whole.nbytes
        while self._kept_bytes > self._limit:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.nbytes

    def _verify(self, span: Span, key: tuple[str, int]) -> None:
        """Verify a span that is too large to be held, and remember what its blocks are."""
        state, digests = xxhash.xxh3_64(), list[int]()
        for at in range(span.begin, span.end, _BLOCK):
            block = self.repository.store.get(key[0], at, min(at + _BLOCK, span.end))
            state.update(block)
            digests.append(_digest(block))
        self.bytes_read += span.size
        if state.hexdigest() != span.checksum:
            raise self._damaged(key[0], span, span.checksum, state.hexdigest())
        self._blocks[key] = digests

    def _reread(self, span: Span, key: tuple[str, int], begin: int, end: int) -> memoryview:
        """Bytes of a span that was verified before: whole blocks, each of which must be what it was then."""
        first, last = begin // _BLOCK, -(-end // _BLOCK)
        start = first * _BLOCK
        raw = self.repository.store.get(key[0], span.begin + start, min(span.begin + last * _BLOCK, span.end))
        self.bytes_read += raw.nbytes
        for number in range(first, last):
            found = _digest(raw[number * _BLOCK - start : (number + 1) * _BLOCK - start])
            if found != self._blocks[key][number]:
                raise self._damaged(key[0], span, f"{self._blocks[key][number]:016x}", f"{found:016x}")
        return raw[begin - start : end - start]

    def _damaged(self, key: str, span: Span, expected: str, found: str) -> CorruptionError:
        return CorruptionError(
            f"{key} in {self.repository.store.url}: tensor {span.tensor!r} (bytes {span.begin} to {span.end}) is not "
            "what was written. Restore the object from a copy, or resume an ancestor",
            key=key, expected=expected, found=found,
        )  # fmt: skip


def _digest(block: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(block)


@dataclass(frozen=True)
class _Index:
    """The entries of one field in one link, in their order, and the global rows ``low`` to ``high`` that they span."""

    parts: list[ShardEntries]
    entries: list[Entry]
    low: Ids
    high: Ids

    def within(self, rows: range) -> list[ShardEntries]:
        """The shards of the link with only those entries that may carry a row of the range."""
        found: list[tuple[ShardEntries, list[Entry]]] = []
        for at in np.flatnonzero((self.low < rows.stop) & (self.high > rows.start)).tolist():
            if not found or found[-1][0] is not self.parts[at]:
                found.append((self.parts[at], []))
            found[-1][1].append(self.entries[at])
        return [replace(part, entries=tuple(entries)) for part, entries in found]


class TableRecords:
    """One table along a chain.

    Args:
        reader: may be shared by the tables of one pass.
        ranks: per link, base first, the rank manifests that its tables are read from.
        kept_ids: bytes of row ids to keep.

    Attributes:
        shards: the table's parts as the newest link cuts it, each once, by row and column.
    """

    def __init__(
        self, reader: SpanReader, ranks: Sequence[Sequence[RankManifest]], table: str, *, kept_ids: int = 64 * MIB
    ) -> None:
        self._reader = reader
        self._table = table
        self._kept_ids = kept_ids
        self._chain: list[list[ShardEntries]] = []
        self._owners: dict[int, RankManifest] = {}
        self._ids: OrderedDict[int, Ids] = OrderedDict()
        self._ids_bytes = 0
        self._indices: dict[str, list[_Index]] = {}
        for link in ranks:
            parts = [(rank, part) for rank in link for part in rank.shards if part.shard.table == table]
            for rank, part in parts:
                self._owners.update((id(each), rank) for each in (*part.entries, *part.rowsets))
            self._chain.append([part for _, part in parts])
        self.shards = distinct(part.shard for part in self._chain[-1])

    def plan(self, field: str, rows: range, cols: range) -> list[Read]:
        """The reads that give every wanted row once, newest link first.

        Raises:
            CorruptionError: some row is in no checkpoint of the chain.
        """
        if field not in self._indices:
            self._indices[field] = [self._index(field, link) for link in self._chain]
        chain = [index.within(rows) for index in self._indices[field]]
        try:
            return list(plan_reads(chain, field, rows, cols, self._row_ids))
        except MissingRows as missing:
            raise CorruptionError(
                f"table {self._table}, field {field!r}: {missing} in {self._reader.repository.store.url}; the chain "
                "does not cover it. Restore the store from a copy, or resume an ancestor",
                key="", expected="every row", found=str(missing),
            ) from missing  # fmt: skip

    def _index(self, field: str, link: Sequence[ShardEntries]) -> _Index:
        parts, entries, low, high = list[ShardEntries](), list[Entry](), list[int](), list[int]()
        for part in link:
            for entry in part.entries:
                if entry.field != field:
                    continue
                if isinstance(entry.rows, range):
                    first, stop = entry.rows.start, entry.rows.stop
                else:
                    ids = self._row_ids(0, part, entry.rows)
                    first, stop = (int(ids[0]), int(ids[-1]) + 1) if len(ids) else (0, 0)
                parts.append(part)
                entries.append(entry)
                low.append(part.shard.row_start + first)
                high.append(part.shard.row_start + stop)
        return _Index(parts, entries, np.array(low, dtype=np.int64), np.array(high, dtype=np.int64))

    def _row_ids(self, link: int, part: ShardEntries, index: int) -> Ids:
        del link
        row_set: RowSet = part.rowsets[index]
        if (known := self._ids.get(id(row_set))) is not None:
            self._ids.move_to_end(id(row_set))
            return known
        owner = self._owners[id(row_set)]
        raw = self._reader.read_whole(owner, row_set.at)
        ids = decode_rows(raw, count=row_set.count, rows=part.shard.rows, key=owner.packs[row_set.at.pack].key)
        self._ids[id(row_set)] = ids
        self._ids_bytes += ids.nbytes
        while self._ids_bytes > self._kept_ids and len(self._ids) > 1:
            self._ids_bytes -= self._ids.popitem(last=False)[1].nbytes
        return ids

    def records(self, read: Read) -> np.ndarray:
        """The records that a read takes, ``uint8 [rows, record]``; not to be written to."""
        entry, size = read.entry, read.entry.record
        if isinstance(read.positions, slice):
            first, stop = read.positions.start, read.positions.stop
        else:
            first, stop = int(read.positions[0]), int(read.positions[-1]) + 1
        raw = self._reader.read(self._owners[id(entry)], entry.at, first * size, stop * size)
        found = np.frombuffer(raw, dtype=np.uint8).reshape(-1, size)
        return found if isinstance(read.positions, slice) else take_rows(found, read.positions - first)

    def read_entry(self, entry: Entry, into: memoryview) -> None:
        """All records of an entry, into memory of exactly their size."""
        self._reader.read_whole(self._owners[id(entry)], entry.at, into)

    def sources(self, name: str, rows: range) -> npt.NDArray[np.uint64]:
        """Where each row of a field is read from, as a number: rows with equal ones are the same."""
        found = np.zeros(len(rows), dtype=np.uint64)
        for read in self.plan(name, rows, range(self.shards[0].table_cols)):
            pack = self._owners[id(read.entry)].packs[read.entry.at.pack].key
            place = np.uint64(xxhash.xxh3_64_intdigest(f"{pack} {read.entry.at.begin} {read.cols}".encode()))
            if isinstance(read.positions, slice):
                positions = np.arange(read.positions.start, read.positions.stop, dtype=np.uint64)
            else:
                positions = read.positions.astype(np.uint64)
            at = local(read.rows, rows.start)
            found[at] = found[at] * _FACTOR + (positions + place)  # several reads give one row where columns are cut
        return found

    def field(self, name: str) -> Field:
        """A field of the whole table: as wide as the table where it has its columns."""
        shard = self.shards[0]
        found = field_of(shard, name)
        assert found is not None, f"{self._table} has no field {name}"
        return replace(found, width=shard.table_cols) if found.width == shard.cols else found

    def values(self, name: str, rows: range) -> np.ndarray:
        """A field's decoded rows as bytes, ``uint8 [rows, row_bytes of field(name)]``.

        Row-wise state of several column shards is their mean, weighted by columns, as at a resume into one shard.
        """
        cols = range(self.shards[0].table_cols)
        whole = self.field(name)
        size = DTYPE_BYTES[whole.dtype]
        has_columns = self.shards[0].cols == (field_of(self.shards[0], name) or whole).width
        found = np.zeros((len(rows), whole.row_bytes), dtype=np.uint8)
        mean: np.ndarray | None = None
        for read in reversed(self.plan(name, rows, cols)):
            stored = read.shard_entries.shard
            spec = field_of(stored, name) or whole
            raw = row_bytes(self.records(read), read.entry.codec, spec)
            at = local(read.rows, rows.start)
            if has_columns:
                source = slice((read.cols.start - stored.col_start) * size, (read.cols.stop - stored.col_start) * size)
                found[at, read.cols.start * size : read.cols.stop * size] = raw[:, source]
            elif len(read.cols) == len(cols):
                put_rows(found, at, raw)
            else:
                numbers = numbers_of(raw, spec)
                mean = np.zeros((len(rows), whole.width), dtype=numbers.dtype) if mean is None else mean
                mean[at] += numbers * numbers.dtype.type(len(read.cols) / len(cols))
        return found if mean is None else bytes_of(mean, whole)


def distinct(shards: Iterable[Shard]) -> list[Shard]:
    """Shards by table, row and column; what several ranks hold alike is there once."""
    places = {(s.table, s.row_start, s.col_start, s.rows, s.cols): s for s in shards}
    return [places[place] for place in sorted(places)]


def row_bytes(records: np.ndarray, codec: str, field: Field) -> np.ndarray:
    """Records as the rows' own bytes, ``uint8 [n, field.row_bytes]``."""
    if codec == "raw":
        return records
    return bytes_of(decode_records(np.ascontiguousarray(records), codec, field), field)


def local(rows: slice | Ids, start: int) -> slice | Ids:
    return slice(rows.start - start, rows.stop - start) if isinstance(rows, slice) else rows - start


def put_rows(target: np.ndarray, at: slice | Ids, records: np.ndarray) -> None:
    """``target[at] = records`` for rows of bytes that lie together, each row moved at once."""
    if isinstance(at, slice) or not records.flags.c_contiguous or not target.flags.c_contiguous:
        target[at] = records
    else:
        _as_items(target)[at] = _as_items(records)


def take_rows(records: np.ndarray, at: Ids) -> np.ndarray:
    """``records[at]``, each row moved at once."""
    taken = _as_items(records).take(at)
    return taken.view(np.uint8).reshape(len(at), records.shape[1])


def _as_items(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.dtype((np.void, rows.shape[1]))).reshape(-1)
