"""Shards and state of a rank manifest, from JSON to facts and back, each checked by itself (docs/format.md, section 6).

It must not know in which packs the spans lie, and does not look into row sets or trees.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from incremental_ckpt.format.columns import Columns, from_columns
from incremental_ckpt.format.members import MAX_INT, MalformedError, Members, UnsupportedError, integer
from incremental_ckpt.format.rank_facts import (
    CODECS,
    MAX_DIMENSIONS,
    Entry,
    Place,
    RowSet,
    ShardEntries,
    Span,
    State,
    StateTensor,
)
from incremental_ckpt.model import DTYPE_BYTES, Field, Shard

_Owner = tuple[dict[str, Field], Shard, tuple[RowSet, ...]]
"""The shard of an entry: its fields by name, the shard itself, its row sets."""

T = TypeVar("T")


def written_shard(part: ShardEntries) -> dict[str, Any]:
    shard = part.shard
    return {
        "table": shard.table,
        "table_rows": shard.table_rows,
        "table_cols": shard.table_cols,
        "row_start": shard.row_start,
        "rows": shard.rows,
        "col_start": shard.col_start,
        "cols": shard.cols,
        **({"replicated": True} if part.replicated else {}),
        "fields": [{"name": field.name, "dtype": field.dtype, "width": field.width} for field in shard.fields],
        "rowsets": [{"count": rowset.count, "at": _written_span(rowset.at)} for rowset in part.rowsets],
        "entries": [_written_entry(entry) for entry in part.entries],
    }


def _written_entry(entry: Entry) -> dict[str, Any]:
    if isinstance(entry.rows, range):
        if entry.rows.step != 1:
            raise ValueError(f"an entry of {entry.field} has {entry.rows}: only ranges of step 1 can be written")
        rows: dict[str, Any] = {"range": [entry.rows.start, entry.rows.stop]}
    else:
        rows = {"set": entry.rows}
    return {
        "field": entry.field,
        "codec": entry.codec,
        "record": entry.record,
        "rows": rows,
        "at": _written_span(entry.at),
    }


def _written_span(span: Span) -> dict[str, Any]:
    return {
        "pack": span.pack,
        "tensor": span.tensor,
        "begin": span.begin,
        "end": span.end,
        "checksum": span.checksum,
    }


def written_state(state: State) -> dict[str, Any]:
    tensors = [
        {"dtype": tensor.dtype, "shape": list(tensor.shape), "at": _written_span(tensor.at)} for tensor in state.tensors
    ]
    return {"name": state.name, "tree": state.tree, "tensors": tensors}


def places_of(shards: Columns) -> list[Place]:
    return from_columns(
        Place,
        shards.names("table"),
        shards.integers("row_start"),
        shards.integers("rows"),
        shards.integers("col_start"),
        shards.integers("cols"),
        shards.booleans("replicated", default=False),
    )


def read_shards(shards: Columns) -> tuple[ShardEntries, ...]:
    fields = _fields(shards)
    facts = _shards(shards, fields)
    listed, owned = shards.lists("rowsets")
    most = [shard.rows for shard, own in zip(facts, owned, strict=True) for _ in own]
    rowsets = _grouped(from_columns(RowSet, listed.integers("count", 0, most), _spans(listed)), owned)
    listed, owned = shards.lists("entries")
    owners = [owner for owner, own in zip(zip(fields, facts, rowsets, strict=True), owned, strict=True) for _ in own]
    entries = _grouped(_entries(listed, owners), owned)
    return tuple(from_columns(ShardEntries, facts, rowsets, entries, shards.booleans("replicated", default=False)))


def read_state(members: Members) -> State:
    return State(members.name("name"), members.value("tree"), _tensors(Columns.of(members, "tensors")))


def _shards(shards: Columns, fields: Sequence[Mapping[str, Field]]) -> list[Shard]:
    table_rows, table_cols = shards.integers("table_rows"), shards.integers("table_cols", 1)
    row_start = shards.integers("row_start", 0, table_rows)
    col_start = shards.integers("col_start", 0, [cols - 1 for cols in table_cols])
    rows = shards.integers("rows", 0, list(map(operator.sub, table_rows, row_start)))
    cols = shards.integers("cols", 1, list(map(operator.sub, table_cols, col_start)))
    of_each = (tuple(own.values()) for own in fields)
    return list(map(Shard, shards.names("table"), table_rows, table_cols, row_start, rows, col_start, cols, of_each))


def _fields(shards: Columns) -> list[dict[str, Field]]:
    """Those of each shard by name. Shards whose fields are alike share them."""
    listed, owned = shards.lists("fields")
    described = list(zip(listed.names("name"), _dtypes(listed), listed.integers("width", 1), strict=True))
    distinct: dict[tuple[tuple[str, str, int], ...], dict[str, Field]] = {}
    found = []
    for index, own in enumerate(owned):
        key = tuple(described[own.start : own.stop])
        if (fields := distinct.get(key)) is None:
            if not key:
                raise MalformedError(f"{shards.place(index)}.fields is empty")
            fields = distinct[key] = {name: Field(name, dtype, width) for name, dtype, width in key}
            if len(fields) != len(key):
                raise MalformedError(f"{shards.place(index)}.fields has two fields of one name")
        found.append(fields)
    return found


def _dtypes(columns: Columns) -> list[str]:
    dtypes = columns.texts("dtype")
    if not DTYPE_BYTES.keys() >= set(dtypes):
        index, dtype = next((i, d) for i, d in enumerate(dtypes) if d not in DTYPE_BYTES)
        raise UnsupportedError(f"{columns.place(index)}.dtype is {dtype[:40]!r}, which this version does not know")
    return dtypes


def _entries(entries: Columns, owners: Sequence[_Owner]) -> list[Entry]:
    codecs = entries.texts("codec")
    for index, codec in enumerate(codecs):
        if codec not in CODECS:
            raise UnsupportedError(f"{entries.place(index)}.codec is {codec[:40]!r}, which this version cannot decode")
    fields = [fields.get(name) for (fields, _, _), name in zip(owners, entries.texts("field"), strict=True)]
    records = entries.integers("record", 1)
    rows = _rows(entries.objects("rows"), owners)
    spans = _spans(entries)
    names = []
    for index, (field, codec, record, rows_of, at, owner) in enumerate(
        zip(fields, codecs, records, rows, spans, owners, strict=True)
    ):
        if field is None:
            raise MalformedError(f"{entries.place(index)}.field is none of the shard's fields")
        if codec == "raw" and record != field.row_bytes:
            raise MalformedError(
                f"{entries.place(index)}.record is {record}, and raw records of {field} have {field.row_bytes} bytes"
            )
        count = owner[2][rows_of].count if isinstance(rows_of, int) else len(rows_of)
        if at.end - at.begin != count * record:
            raise MalformedError(
                f"{entries.place(index)}.at has {at.size} bytes, and {count} records of {record} bytes have another "
                "size"
            )
        names.append(field.name)
    return from_columns(Entry, names, list(map(sys.intern, codecs)), records, rows, spans)


def _rows(columns: Columns, owners: Sequence[_Owner]) -> list[range | int]:
    in_sets = columns.having("set")
    for index, (in_set, in_range) in enumerate(zip(in_sets, columns.having("range"), strict=True)):
        if in_set == in_range:
            raise MalformedError(f"{columns.place(index)} is neither a set nor a range")
    sets = [index for index, in_set in enumerate(in_sets) if in_set]
    ranges = [index for index, in_set in enumerate(in_sets) if not in_set]
    found: list[range | int] = [0] * len(columns)
    last = [len(owners[index][2]) - 1 for index in sets]
    for index, rowset in zip(sets, columns.chosen(sets).integers("set", 0, last), strict=True):
        found[index] = rowset
    for index, bounds in zip(ranges, columns.chosen(ranges).arrays("range"), strict=True):
        found[index] = _range(bounds, f"{columns.place(index)}.range", owners[index][1].rows)
    return found


def _range(bounds: list[Any], place: str, rows: int) -> range:
    if len(bounds) != 2:
        raise MalformedError(f"{place} has {len(bounds)} bounds instead of 2")
    begin = integer(bounds[0], f"{place}[0]", 0, rows)
    return range(begin, integer(bounds[1], f"{place}[1]", begin, rows))


def _tensors(tensors: Columns) -> tuple[StateTensor, ...]:
    dtypes = _dtypes(tensors)
    shapes = [_shape(*one) for one in zip(tensors.each(), dtypes, strict=True)]
    spans = _spans(tensors)
    for index, (dtype, shape, at) in enumerate(zip(dtypes, shapes, spans, strict=True)):
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        if at.size != size:
            raise MalformedError(f"{tensors.place(index)}.at has {at.size} bytes, and its tensor has {size}")
    return tuple(map(StateTensor, dtypes, shapes, spans))


def _shape(members: Members, dtype: str) -> tuple[int, ...]:
    shape = tuple(integer(size, members.place("shape")) for size in members.items("shape"))
    if len(shape) > MAX_DIMENSIONS:
        raise MalformedError(f"{members.place('shape')} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    # Without the zeros too: numpy and torch refuse an empty tensor whose other sizes overflow.
    if math.prod(size for size in shape if size) * DTYPE_BYTES[dtype] > MAX_INT:
        raise MalformedError(f"{members.place('shape')} is larger than any memory")
    return shape


def _spans(columns: Columns) -> list[Span]:
    """What each has at ``at``."""
    at = columns.objects("at")
    begin = at.integers("begin")
    end = at.integers("end", begin)
    return from_columns(Span, at.integers("pack"), at.texts("tensor"), begin, end, at.hexadecimals("checksum", 16))


def _grouped(row: Sequence[T], owned: Sequence[range]) -> list[tuple[T, ...]]:
    return [tuple(row[own.start : own.stop]) for own in owned]
