"""One window of an equivalent base: the records of its rows out of the chain, grouped by codec.

It must not know packs or what is written where.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from incremental_ckpt.compaction.cut import Window
from incremental_ckpt.errors import MismatchError
from incremental_ckpt.format.replay import Read
from incremental_ckpt.model import DTYPE_BYTES, Field, Shard
from incremental_ckpt.repository.read import field_of
from incremental_ckpt.repository.records import TableRecords, local, put_rows, row_bytes, take_rows

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Rows of a window that one codec carries.

    Attributes:
        rows: local to the shard that is written: a range, or ascending ids.
        records: ``uint8 [rows, record]``.
    """

    codec: str
    rows: range | Ids
    records: np.ndarray


@dataclass(frozen=True)
class _Source:
    """A read, and what becomes of its records: those of a codec, or raw ones of some columns (bytes of a row)."""

    read: Read
    codec: str
    record: int
    field: Field
    take: slice | None = None
    put: slice | None = None


def assemble(table: TableRecords, shard: Shard, window: Window, memory: memoryview) -> list[Group]:
    """The records of a window, each as it is stored in the chain; the later entry holds.

    Args:
        memory: room for the window's rows; the records lie there where all are of one codec.

    Raises:
        CorruptionError, NotFoundError: as reading does.
        MismatchError: the chain cuts columns so that row-wise state would have to be averaged.
    """
    field, rows = window.field, window.rows
    cols = range(shard.col_start, shard.col_start + shard.cols)
    sources = [_source(read, field, shard) for read in table.plan(field.name, rows, cols)]
    forms = sorted({(source.codec, source.record) for source in sources})
    buffers = {form: _room(form[1], len(rows), memory if len(forms) == 1 else None) for form in forms}
    form_of = np.zeros(len(rows) if len(forms) > 1 else 0, dtype=np.uint8)
    # Oldest first: what is read whole may reach over rows that newer entries then overwrite.
    for source in reversed(sources):
        form = (source.codec, source.record)
        at = local(source.read.rows, rows.start)
        _fill(table, source, rows, at, buffers[form])
        if len(forms) > 1:
            form_of[at] = forms.index(form)
    first = rows.start - shard.row_start
    if len(forms) == 1:
        return [Group(forms[0][0], range(first, first + len(rows)), buffers[forms[0]])]
    return [_group(codec, np.flatnonzero(form_of == i), first, buffers[codec, r]) for i, (codec, r) in enumerate(forms)]


def _group(codec: str, at: Ids, first: int, records: np.ndarray) -> Group:
    begin, stop = int(at[0]), int(at[-1]) + 1
    if stop - begin == len(at):
        return Group(codec, range(first + begin, first + stop), records[begin:stop])
    return Group(codec, at + first, take_rows(records, at))


def _room(record: int, rows: int, memory: memoryview | None) -> np.ndarray:
    if memory is None:
        return np.empty((rows, record), dtype=np.uint8)
    return np.frombuffer(memory[: rows * record], dtype=np.uint8).reshape(rows, record)


def _fill(table: TableRecords, source: _Source, rows: range, at: slice | Ids, target: np.ndarray) -> None:
    read = source.read
    if source.put is None and source.codec == read.entry.codec and isinstance(read.entry.rows, range):
        first = read.shard_entries.shard.row_start + read.entry.rows.start - rows.start
        if first >= 0 and first + len(read.entry.rows) <= len(rows):
            table.read_entry(read.entry, target[first : first + len(read.entry.rows)].reshape(-1).data)
            return
    records = table.records(read)
    if source.codec != read.entry.codec:
        records = row_bytes(records, read.entry.codec, source.field)
    if source.put is None:
        put_rows(target, at, records)
    else:
        target[at, source.put] = records[:, source.take]


def _source(read: Read, field: Field, shard: Shard) -> _Source:
    stored, entry = read.shard_entries.shard, read.entry
    spec = field_of(stored, field.name) or field
    if not (spec.width == stored.cols and field.width == shard.cols):
        # One value for all columns of a shard.
        if len(read.cols) != shard.cols:
            raise MismatchError(
                f"table {shard.table}: the checkpoints of this chain cut its columns in several ways, and {field.name} "
                "has one value for each part. A save of kind 'full' begins a chain that can be compacted"
            )
        return _Source(read, entry.codec, entry.record, spec)
    if len(read.cols) == shard.cols == stored.cols:
        return _Source(read, entry.codec, entry.record, spec)
    # Columns of a record that cannot be cut are stored raw, as a resume would decode them: that loses nothing.
    size = DTYPE_BYTES[field.dtype]
    take = slice((read.cols.start - stored.col_start) * size, (read.cols.stop - stored.col_start) * size)
    put = slice((read.cols.start - shard.col_start) * size, (read.cols.stop - shard.col_start) * size)
    return _Source(read, "raw", field.row_bytes, spec, take, put)
