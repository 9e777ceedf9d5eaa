"""Writes one part of an equivalent base: packs through a few buffers, each read back, then the part's rank manifest.

It must not know what commits the parts.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from incremental_ckpt.compaction.assemble import Group, assemble
from incremental_ckpt.compaction.cut import PACK_BYTES, Window, windows
from incremental_ckpt.errors import CorruptionError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Entry, Pack, RankManifest, RowSet, ShardEntries, Span
from incremental_ckpt.format.pack import FinishedPack, PackBuilder, checksum
from incremental_ckpt.format.rowset import encode_rows
from incremental_ckpt.model import Shard
from incremental_ckpt.repository import Repository
from incremental_ckpt.repository.records import SpanReader, TableRecords

Progress = Callable[[int, int], None]
"""``progress(bytes done, bytes in all)`` of decoded rows."""

_ALIGN = 64
_CHECK_BYTES = 4 << 20
_MOST_BUFFERS = 4
# safetensors has no complex dtypes; their bytes are stored as they are.
_AS_BYTES = frozenset({"complex64", "complex128"})


@dataclass(frozen=True)
class Budget:
    """How a bound of memory is spent, in bytes. Beside it a process needs what Python and numpy take, about 80 MiB."""

    buffers: int
    kept_records: int
    kept_ids: int

    @classmethod
    def of(cls, memory: int) -> Budget:
        return cls(max(1, min(_MOST_BUFFERS, memory // (4 * PACK_BYTES))), memory // 4, memory // 8)


@dataclass
class _Parts:
    """What the rank manifest will say of one shard."""

    rowsets: list[RowSet] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    tensors: int = 0


class PartWriter:
    """Writes the shards of one part.

    Args:
        ranks: per link of the chain the rank manifests that its tables are read from.
        part, parts: which of how many; in the format, a rank of a world.
    """

    def __init__(
        self,
        repository: Repository,
        ranks: Sequence[Sequence[RankManifest]],
        *,
        seq: int,
        attempt: str,
        part: int,
        parts: int,
        memory: int,
        progress: Progress | None,
    ) -> None:
        self._repository = repository
        self._ranks = ranks
        self._seq = seq
        self._attempt = attempt
        self._part = part
        self._parts = parts
        self._budget = Budget.of(memory)
        self._progress = progress
        self._reader = SpanReader(repository, self._budget.kept_records)
        self._present = {o.key: o.size for o in repository.store.list(layout.attempt_prefix(seq, attempt))}
        self._buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self._written: deque[Future[None]] = deque()
        self._packs: list[Pack] = []
        self.bytes_written = 0

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def write(self, shards: Sequence[Shard]) -> bytes:
        """Write the part, unless it is there; its rank manifest, as it is in the store.

        Raises:
            CorruptionError: an input is damaged, or what is there of an earlier run is not what this one writes.
        """
        key = layout.rank_manifest_key(self._seq, self._attempt, self._part)
        if key in self._present:
            return bytes(self._repository.store.get(key))
        for _ in range(self._budget.buffers):
            self._buffers.put(np.empty(PACK_BYTES, dtype=np.uint8))
        with ThreadPoolExecutor(self._budget.buffers, "ickpt-compact") as pool:
            try:
                found = self._write_packs(shards, pool)
                for written in self._written:
                    written.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        manifest = RankManifest(
            self._seq, self._attempt, self._part, self._parts, "ok", "", tuple(self._packs), tuple(found), (),
            sum(shard.rows for shard in shards if shard.col_start == 0),
        )  # fmt: skip
        raw = manifest.to_bytes()
        self._repository.store.put(key, [raw])
        self.bytes_written += len(raw)
        return raw

    def _write_packs(self, shards: Sequence[Shard], pool: ThreadPoolExecutor) -> list[ShardEntries]:
        parts = [_Parts() for _ in shards]
        total = sum(shard.rows * shard.row_bytes for shard in shards)
        table: TableRecords | None = None
        done, pack = 0, _OpenPack(self._next_buffer())
        for window in windows(shards):
            shard, size = shards[window.shard], len(window.rows) * window.field.row_bytes
            if pack.used and pack.used + size > PACK_BYTES:
                self._close(pack, parts, pool)
                pack = _OpenPack(self._next_buffer())
            if table is None or table.shards[0].table != shard.table:
                table = TableRecords(self._reader, self._ranks, shard.table, kept_ids=self._budget.kept_ids)
            pack.add(window, assemble(table, shard, window, pack.room(size)), parts[window.shard])
            done += size
            if self._progress is not None:
                self._progress(done, total)
        if pack.used:
            self._close(pack, parts, pool)
        return [ShardEntries(s, tuple(p.rowsets), tuple(p.entries)) for s, p in zip(shards, parts, strict=True)]

    def _next_buffer(self) -> np.ndarray:
        """A buffer that is free again; waits for one, and raises what went wrong with a pack before."""
        buffer = self._buffers.get()
        while self._written and self._written[0].done():
            self._written.popleft().result()
        return buffer

    def _close(self, pack: _OpenPack, parts: Sequence[_Parts], pool: ThreadPoolExecutor) -> None:
        index = len(self._packs)
        finished = pack.builder.finish(layout.pack_key(self._seq, self._attempt, self._part, index), index)
        pack.describe(parts, finished.spans)
        self._packs.append(finished.pack)
        self._written.append(pool.submit(self._write, finished, pack.buffer))

    def _write(self, finished: FinishedPack, buffer: np.ndarray) -> None:
        try:
            there = self._present.get(finished.pack.key)
            if there is None:
                self._repository.store.put(finished.pack.key, finished.parts)
                self.bytes_written += finished.pack.size
            elif there != finished.pack.size:
                raise _unlike(self._repository, finished.pack, f"{finished.pack.size} bytes", f"{there} bytes")
            verify_pack(self._repository, finished.pack, finished.spans)
        finally:
            self._buffers.put(buffer)


class _OpenPack:
    """A pack that is being filled. Its tensors lie in the buffer or in memory of their own."""

    def __init__(self, buffer: np.ndarray) -> None:
        self.buffer = buffer
        self.builder = PackBuilder()
        self.used = 0
        self._pending: list[tuple[int, Window | None, Group | None, int, int]] = []

    def room(self, size: int) -> memoryview:
        """The next bytes of the buffer; memory of its own for a row that is larger than a pack."""
        if self.used + size > self.buffer.nbytes:
            return np.empty(size, dtype=np.uint8).data
        return self.buffer[self.used : self.used + size].data

    def add(self, window: Window, groups: Sequence[Group], parts: _Parts) -> None:
        for group in groups:
            name = f"{window.shard}.{window.field.name}.{parts.tensors}"
            parts.tensors += 1
            if not isinstance(group.rows, range):
                raw = encode_rows(group.rows)
                at = self.builder.add(f"{name}.rows", "uint8", (len(raw),), [raw])
                self._pending.append((window.shard, None, None, at, len(group.rows)))
            typed = group.codec == "raw" and window.field.dtype not in _AS_BYTES
            count, record = group.records.shape
            dtype, shape = (window.field.dtype, (count, window.field.width)) if typed else ("uint8", (count, record))
            at = self.builder.add(name, dtype, shape, [_flat(group.records)])
            self._pending.append((window.shard, window, group, at, count))
        size = len(window.rows) * window.field.row_bytes
        self.used += (size + _ALIGN - 1) // _ALIGN * _ALIGN

    def describe(self, parts: Sequence[_Parts], spans: Sequence[Span]) -> None:
        """Say in the shards' parts where everything lies."""
        for shard, window, group, at, count in self._pending:
            if window is None or group is None:
                parts[shard].rowsets.append(RowSet(count, spans[at]))
                continue
            rows = group.rows if isinstance(group.rows, range) else len(parts[shard].rowsets) - 1
            entry = Entry(window.field.name, group.codec, group.records.shape[1], rows, spans[at])
            parts[shard].entries.append(entry)


def verify_pack(repository: Repository, pack: Pack, spans: Sequence[Span]) -> None:
    """Read a pack back and compare every checksum.

    Raises:
        CorruptionError: the store does not give what was written.
    """
    header = repository.store.get(pack.key, 0, pack.header_size)
    if checksum(header) != pack.header_checksum:
        raise _unlike(repository, pack, pack.header_checksum, checksum(header))
    scratch = np.empty(min(_CHECK_BYTES, pack.size), dtype=np.uint8)
    state, following = xxhash.xxh3_64(), iter(spans)
    span = next(following, None)
    for begin in range(pack.header_size, pack.size, _CHECK_BYTES):
        end = min(begin + _CHECK_BYTES, pack.size)
        block: Any = repository.store.get(pack.key, begin, end, scratch[: end - begin].data)
        while span is not None and span.begin < end:
            state.update(block[max(span.begin, begin) - begin : min(span.end, end) - begin])
            if span.end > end:
                break
            if state.hexdigest() != span.checksum:
                raise _unlike(repository, pack, span.checksum, state.hexdigest())
            state, span = xxhash.xxh3_64(), next(following, None)


def _flat(records: np.ndarray) -> memoryview:
    flat: memoryview = np.ascontiguousarray(records).reshape(-1).data
    return flat


def _unlike(repository: Repository, pack: Pack, expected: str, found: str) -> CorruptionError:
    return CorruptionError(
        f"{pack.key} in {repository.store.url} does not hold what the compaction writes there. If an earlier one left "
        "it damaged, delete it and compact again; else the store loses data",
        key=pack.key, expected=expected, found=found,
    )  # fmt: skip
