"""One field of one live table, and how records come into it: as they are, decoded, by columns, or by a rule.

It must not know stores, nor in which order entries are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from incremental_ckpt.codecs import codec_named
from incremental_ckpt.format.replay import Read
from incremental_ckpt.model import Field, Table
from incremental_ckpt.repository.read import field_of
from incremental_ckpt.repository.records import put_rows, take_rows

MEAN = "the mean over the column shards that there were, by shared columns"
COPY = "in every column shard that of all columns"


class Target:
    """One field of one live table, into which records are put."""

    def __init__(self, table: Table, field: Field) -> None:
        self._shard = table.shard
        self._field = field
        self._live = table.tensors[field.name].detach()
        as_bytes = self._live.device.type == "cpu" and self._live.numel() > 0 and self._live.stride(1) == 1
        self._bytes = self._live.view(torch.uint8).numpy() if as_bytes else None
        self._itemsize = self._live.element_size()

    def split(self, reads: Sequence[Read]) -> tuple[list[tuple[Read, memoryview]], list[Read]]:
        """The reads of entries that go as they are into live memory, with that memory, and all others.

        Those of the first kind write all rows of their entries, also those that the plan takes from newer ones: they
        have to be done before any of the second kind begins. Among themselves they meet in no row.
        """
        live = self._bytes
        if live is None or not live.flags.c_contiguous:
            return [], list(reads)
        found = [(rows.start, rows.stop, i) for i, read in enumerate(reads) if (rows := self._same_bytes(read))]
        straight, done = dict[int, memoryview](), 0
        for start, stop, index in sorted(found):
            if start >= done:
                straight[index], done = live[start:stop].reshape(-1).data, stop
        others = [read for index, read in enumerate(reads) if index not in straight]
        return [(reads[index], memory) for index, memory in straight.items()], others

    def _same_bytes(self, read: Read) -> range | None:
        """The live rows that are byte by byte what the entry holds, if it is worth reading all of it there."""
        entry = read.entry
        if not isinstance(entry.rows, range) or entry.codec != "raw" or self._columns(read) is not None:
            return None
        start = read.shard_entries.shard.row_start + entry.rows.start - self._shard.row_start
        inside = start >= 0 and start + len(entry.rows) <= self._shard.rows
        wanted = read.rows.stop - read.rows.start if isinstance(read.rows, slice) else len(read.rows)
        worth = inside and 2 * wanted >= len(entry.rows) and entry.record == self._field.row_bytes
        return range(start, start + len(entry.rows)) if worth else None

    def put(self, read: Read, entry: np.ndarray) -> None:
        """Args: entry: all records of the read's entry."""
        rows, columns, share = self._local(read), self._columns(read), self._share(read)
        records = entry[read.positions] if isinstance(read.positions, slice) else take_rows(entry, read.positions)
        if self._bytes is not None and read.entry.codec == "raw" and share is None:
            if columns is None:
                put_rows(self._bytes, rows, records)
            else:
                source, target = (slice(c.start * self._itemsize, c.stop * self._itemsize) for c in columns)
                self._bytes[rows, target] = records[:, source]
            return
        stored = field_of(read.shard_entries.shard, self._field.name) or self._field
        decoded = _decoded(records, read.entry.codec, stored)
        # Of memory that it must not write to, torch would warn.
        values = torch.from_numpy(decoded if decoded.flags.writeable else decoded.copy())
        if read.entry.codec == "raw":
            values = values.view(self._live.dtype).view(-1, stored.width)
        live = self._live
        if columns is not None:
            values, live = values[:, columns[0]], live[:, columns[1]]
        at = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else torch.from_numpy(rows)
        at, values = at.to(live.device), values.to(live.device, live.dtype)
        if share is None:
            live.index_copy_(0, at, values)
        else:
            live.index_add_(0, at, values, alpha=share)

    def begin(self, reads: Sequence[Read]) -> str | None:
        """Get ready for these reads.

        Returns:
            The rule by which row-wise state comes from shards with other columns; None: it comes as it was.
        """
        if any(self._share(read) is not None for read in reads):
            self._live.zero_()
            return MEAN
        return COPY if any(self._is_copy(read) for read in reads) else None

    def _is_copy(self, read: Read) -> bool:
        stored = read.shard_entries.shard
        return not self._has_columns(read) and stored.cols != self._shard.cols

    def _local(self, read: Read) -> slice | np.ndarray:
        start = self._shard.row_start
        if isinstance(read.rows, slice):
            return slice(read.rows.start - start, read.rows.stop - start)
        rows: np.ndarray = read.rows - start
        return rows

    def _has_columns(self, read: Read) -> bool:
        """Whether the field has the table's columns. Row-wise state has one value for all columns of a shard."""
        stored = read.shard_entries.shard
        spec = field_of(stored, self._field.name)
        return spec is not None and spec.width == stored.cols and self._field.width == self._shard.cols

    def _columns(self, read: Read) -> tuple[slice, slice] | None:
        """Which columns of a record go to which of the live ones; None: all to all."""
        if not self._has_columns(read):
            return None
        stored = read.shard_entries.shard
        source = slice(read.cols.start - stored.col_start, read.cols.stop - stored.col_start)
        target = slice(read.cols.start - self._shard.col_start, read.cols.stop - self._shard.col_start)
        whole = (source.start, source.stop) == (0, stored.cols) and (target.start, target.stop) == (0, self._shard.cols)
        return None if whole else (source, target)

    def _share(self, read: Read) -> float | None:
        """The weight of row-wise state that comes from several column shards: the mean by shared columns. For row-wise
        Adagrad, whose state sums the mean square of the gradient over the columns, that is the unsharded value."""
        if self._has_columns(read) or len(read.cols) == self._shard.cols:
            return None
        return len(read.cols) / self._shard.cols


def _decoded(records: np.ndarray, codec: str, field: Field) -> np.ndarray:
    return records if codec == "raw" else codec_named(codec).decode(records, field)
