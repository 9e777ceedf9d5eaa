"""Which record of a chain each wanted row comes from: the newest link's last entry that carries it.

It must not know codecs or where packs lie: it reads row sets through its caller, and plans without reading records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from incremental_ckpt.format.rank_facts import Entry, ShardEntries

Ids = npt.NDArray[np.int64]
RowIds = Callable[[int, ShardEntries, int], Ids]


class MissingRows(ValueError):  # noqa: N818 - a fact about the plan; the caller knows whether it is an error
    """Wanted rows that no link of the chain carries.

    Attributes:
        count: how many.
        first: the first of them, a global row of the table.
        cols: the columns for which they are missing, global.
    """

    def __init__(self, count: int, first: int, cols: range) -> None:
        super().__init__(f"{count} rows, the first of them row {first}, are in no link of the chain (columns {cols})")
        self.count = count
        self.first = first
        self.cols = cols


@dataclass(frozen=True)
class Read:
    """Take the records ``positions`` of ``entry``: they are the values of the table's rows ``rows``, in that order.

    Attributes:
        link: the place in the chain, 0 for the base.
        positions: ascending record numbers in the entry.
        rows: global rows of the table, ascending; as many as positions.
        cols: the global columns to take of each record. Fewer than the shard's where fewer are wanted, or where another
            link cuts the table's columns elsewhere.
    """

    link: int
    shard_entries: ShardEntries
    entry: Entry
    positions: slice | Ids
    rows: slice | Ids
    cols: range


def plan_reads(
    chain: Sequence[Sequence[ShardEntries]],
    field: str,
    rows: range,
    cols: range,
    row_ids: RowIds,
) -> Iterator[Read]:
    """The reads that give every wanted row of every wanted column once, newest link first.

    Args:
        chain: for each link, base first, all shards of the table, whatever their ranks.
        field: the field to read.
        rows: the global rows wanted, of step 1.
        cols: the global columns wanted, of step 1.
        row_ids: ``row_ids(link, shard, i)``: the ids of the shard's i-th row set, ascending and local to it. Called
            again for each field and range of rows: the caller keeps what is worth keeping.

    Raises:
        MissingRows: after the last read of the columns concerned, if a wanted row is in no link.
    """
    if not rows:
        return
    for segment in _segments(chain, cols):
        yield from _plan_segment(chain, field, rows, segment, row_ids)


def _segments(chain: Sequence[Sequence[ShardEntries]], cols: range) -> Iterator[range]:
    """The wanted columns, cut wherever a shard of some link begins or ends."""
    cuts = {cols.start, cols.stop} if cols else set()
    for link in chain:
        for part in link:
            cuts |= {part.shard.col_start, part.shard.col_start + part.shard.cols}
    inside = sorted(cut for cut in cuts if cols.start <= cut <= cols.stop)
    for start, stop in pairwise(inside):
        yield range(start, stop)


def _plan_segment(
    chain: Sequence[Sequence[ShardEntries]], field: str, rows: range, cols: range, row_ids: RowIds
) -> Iterator[Read]:
    wanted = np.ones(len(rows), dtype=np.bool_)
    left = len(rows)
    for link in range(len(chain) - 1, -1, -1):
        for part in reversed(chain[link]):
            shard = part.shard
            covers = shard.col_start <= cols.start and cols.stop <= shard.col_start + shard.cols
            if not covers or shard.row_start >= rows.stop or shard.row_start + shard.rows <= rows.start:
                continue
            for entry in reversed(part.entries):
                if left == 0:
                    return
                if entry.field != field:
                    continue
                taken = _take(link, part, entry, rows, wanted, row_ids)
                if taken is not None:
                    positions, ids = taken
                    left -= ids.stop - ids.start if isinstance(ids, slice) else len(ids)
                    yield Read(link, part, entry, positions, ids, cols)
    if left:
        raise MissingRows(left, rows.start + int(np.argmax(wanted)), cols)


def _take(
    link: int, part: ShardEntries, entry: Entry, rows: range, wanted: npt.NDArray[np.bool_], row_ids: RowIds
) -> tuple[slice | Ids, slice | Ids] | None:
    """The entry's records of rows still wanted, as positions and global rows; they are wanted no longer."""
    row_start = part.shard.row_start
    if isinstance(entry.rows, range):
        start = max(entry.rows.start + row_start, rows.start)
        stop = min(entry.rows.stop + row_start, rows.stop)
        if start >= stop:
            return None
        open_rows = wanted[start - rows.start : stop - rows.start]
        first = start - row_start - entry.rows.start
        if open_rows.all():
            open_rows[:] = False
            return slice(first, first + stop - start), slice(start, stop)
        offsets = np.flatnonzero(open_rows)
        open_rows[:] = False
        return (offsets + first, offsets + start) if offsets.size else None
    ids = row_ids(link, part, entry.rows)
    first, last = np.searchsorted(ids, [rows.start - row_start, rows.stop - row_start]).tolist()
    if first == last:
        return None
    ids = ids[first:last] + row_start
    offsets = ids - rows.start
    open_rows = wanted[offsets]
    wanted[offsets] = False
    if open_rows.all():
        return slice(first, last), ids
    positions = np.flatnonzero(open_rows)
    return (positions + first, ids[positions]) if positions.size else None
