"""How an equivalent base is cut into parts, shards and windows: the same for everybody who compacts the checkpoint.

It must not know stores or records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from incremental_ckpt.format.manifest import RankManifest
from incremental_ckpt.model import Field, Shard
from incremental_ckpt.repository import Link

MIB = 1 << 20
PACK_BYTES = 32 * MIB
ENTRY_BYTES = 8 * MIB
MAX_ROWS = 1 << 20
"""Rows of a window: row ids take eight bytes each while it is put together."""

_VERSION = "compact 1"
"""Goes with the sizes above: whoever cuts otherwise writes other packs and needs other attempts."""


@dataclass(frozen=True)
class Window:
    """Rows of one field of one shard that are put together at once: ``rows`` are global."""

    shard: int
    field: Field
    rows: range


def attempt_id(links: Sequence[Link], ranks: Sequence[Sequence[RankManifest]], part: int, parts: int) -> str:
    """The attempt of one of several parts: ``c`` and 15 hex digits. The same inputs give the same name (and, in it, the
    same bytes), so that whoever starts again finds what was written, and several processes share the work.

    A checkpoint's digest stands for its chain, from whatever equivalents it is read: the records are the same. Only
    where shards cut the columns of a table in several ways do they depend on what is read.
    """
    inputs = [_VERSION, links[-1].manifest.digest, f"{part}/{parts}"]
    if not same_columns(ranks):
        inputs += [link.tables.digest for link in links]
    return "c" + hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:15]


def same_columns(ranks: Sequence[Sequence[RankManifest]]) -> bool:
    """Whether all shards of a table, in all links, share its columns in one way."""
    cuts: dict[str, set[frozenset[tuple[int, int]]]] = {}
    for link in ranks:
        here: dict[str, set[tuple[int, int]]] = {}
        for part in (part for rank in link for part in rank.shards):
            here.setdefault(part.shard.table, set()).add((part.shard.col_start, part.shard.cols))
        for table, columns in here.items():
            cuts.setdefault(table, set()).add(frozenset(columns))
    return all(len(found) == 1 for found in cuts.values())


def shards_of_part(shards: Sequence[Shard], part: int, parts: int) -> list[Shard]:
    """The rows that one part writes, as shards: about equal in bytes, each row in one part.

    Args:
        shards: all shards of the checkpoint, each once, in a fixed order.
    """
    total = sum(shard.rows * shard.row_bytes for shard in shards)
    begin, end = total * part // parts, total * (part + 1) // parts
    found, offset = [], 0
    for shard in shards:
        first, stop = _row_at(begin - offset, shard), _row_at(end - offset, shard)
        if part == parts - 1:
            stop = shard.rows
        if first < stop or (shard.rows == 0 and part == 0):
            found.append(replace(shard, row_start=shard.row_start + first, rows=stop - first))
        offset += shard.rows * shard.row_bytes
    return found


def _row_at(offset: int, shard: Shard) -> int:
    step = min(rows_per_window(field) for field in shard.fields)
    return max(0, min(shard.rows, -(-offset // (step * shard.row_bytes)) * step))


def rows_per_window(field: Field) -> int:
    return max(1, min(MAX_ROWS, ENTRY_BYTES // field.row_bytes))


def windows(shards: Sequence[Shard]) -> Iterator[Window]:
    """All rows of all fields, field by field: the entries of a delta that a window meets are those of the next one."""
    for index, shard in enumerate(shards):
        for field in shard.fields:
            step, stop = rows_per_window(field), shard.row_start + shard.rows
            for begin in range(shard.row_start, stop, step):
                yield Window(index, field, range(begin, min(begin + step, stop)))
