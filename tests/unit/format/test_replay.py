"""Replay plans: every wanted cell once, from the newest link's last entry that carries it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from incremental_ckpt.format.manifest import Entry, RowSet, ShardEntries, Span
from incremental_ckpt.format.replay import MissingRows, Read, plan_reads
from incremental_ckpt.model import Field, Shard

AT = Span(0, "t", 64, 64, "0" * 16)
WEIGHT, STATE = "weight", "sum"
Rows = range | Sequence[int]


class Chain:
    """Links of shards whose row sets are kept in memory, and the table that applying the links in order gives."""

    def __init__(self, table_rows: int, table_cols: int) -> None:
        self.table_rows, self.table_cols = table_rows, table_cols
        self.links: list[list[ShardEntries]] = []
        self.newest = np.full((table_rows, table_cols), -1)
        self._values: dict[int, npt.NDArray[np.int64]] = {}
        self._ids: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._parts: list[object] = []

    def link(self, *parts: tuple[range, range, Sequence[Rows]]) -> Chain:
        """Add a link: for each part its rows, its columns, and its entries in order (rows local to the part)."""
        link = []
        for rows, cols, entries in parts:
            shard = Shard(
                "t", self.table_rows, self.table_cols, rows.start, len(rows), cols.start, len(cols),
                (Field(WEIGHT, "float32", len(cols)), Field(STATE, "float32", 1)),
            )  # fmt: skip
            ids = [np.array(entry, dtype=np.int64) for entry in entries if not isinstance(entry, range)]
            places = iter(range(len(ids)))
            made = tuple(
                Entry(name, "raw", 4, entry if isinstance(entry, range) else place, AT)
                for entry in entries
                for place in [-1 if isinstance(entry, range) else next(places)]
                for name in (WEIGHT, STATE)
            )
            part = ShardEntries(shard, tuple(RowSet(len(each), AT) for each in ids), made)
            self._parts.append(part)
            self._ids[id(part)] = ids
            for number, entry in enumerate(entries):
                stamp = len(self.links) * 1000 + number
                self.newest[rows.start + np.array(entry, dtype=np.int64)[:, None], np.array(cols)] = stamp
            link.append(part)
        self.links.append(link)
        return self

    def row_ids(self, link: int, part: ShardEntries, rowset: int) -> npt.NDArray[np.int64]:
        assert any(part is each for each in self.links[link])
        return self._ids[id(part)][rowset]

    def plan(self, rows: range, cols: range | None = None, field: str = WEIGHT) -> list[Read]:
        return list(plan_reads(self.links, field, rows, cols or range(self.table_cols), self.row_ids))

    def ids_of(self, read: Read) -> npt.NDArray[np.int64]:
        rows = read.entry.rows
        local = np.array(rows) if isinstance(rows, range) else self._ids[id(read.shard_entries)][rows]
        return local + read.shard_entries.shard.row_start

    def applied(self, reads: Sequence[Read]) -> npt.NDArray[np.int64]:
        """What the reads give, cell by cell; -1 where nothing is read. Fails where a cell is read twice."""
        table = np.full((self.table_rows, self.table_cols), -1)
        for read in reads:
            ids = self.ids_of(read)[read.positions]
            rows = np.arange(read.rows.start, read.rows.stop) if isinstance(read.rows, slice) else read.rows
            np.testing.assert_array_equal(ids, rows)
            assert (np.diff(rows) > 0).all()
            shard = read.shard_entries.shard
            assert shard.col_start <= read.cols.start < read.cols.stop <= shard.col_start + shard.cols
            entries = [entry for entry in read.shard_entries.entries if entry.field == read.entry.field]
            (number,) = [number for number, entry in enumerate(entries) if entry is read.entry]
            cells = np.ix_(rows, np.array(read.cols))
            assert (table[cells] == -1).all()
            table[cells] = read.link * 1000 + number
        return table


ALL = range(4)


def test_a_base_alone_is_read_in_one_piece() -> None:
    chain = Chain(10, 4).link((range(10), ALL, [range(10)]))
    (read,) = chain.plan(range(10))
    assert (read.link, read.positions, read.rows, read.cols) == (0, slice(0, 10), slice(0, 10), ALL)


def test_a_row_comes_from_the_newest_link_that_carries_it() -> None:
    chain = (
        Chain(10, 4)
        .link((range(10), ALL, [range(10)]))
        .link((range(10), ALL, [[1, 5]]))
        .link((range(10), ALL, [[5, 7]]))
    )
    newest, middle, base = chain.plan(range(10))
    assert (newest.link, middle.link, base.link) == (2, 1, 0)
    assert newest.positions == slice(0, 2)
    np.testing.assert_array_equal(newest.rows, [5, 7])
    np.testing.assert_array_equal(middle.positions, [0])
    np.testing.assert_array_equal(middle.rows, [1])
    np.testing.assert_array_equal(base.positions, [0, 2, 3, 4, 6, 8, 9])
    np.testing.assert_array_equal(base.rows, base.positions)


def test_of_two_entries_of_one_link_the_later_holds() -> None:
    chain = Chain(6, 4).link((range(6), ALL, [range(0, 3), range(3, 6), [2, 3], [3]]))
    reads = chain.plan(range(6))
    np.testing.assert_array_equal(chain.applied(reads), chain.newest)
    assert chain.applied(reads)[:, 0].tolist() == [0, 0, 2, 3, 1, 1]


def test_an_entry_that_newer_ones_cover_is_not_read() -> None:
    chain = Chain(4, 4).link((range(4), ALL, [range(4)])).link((range(4), ALL, [[0, 2], range(4)]))
    assert [(read.link, read.entry.rows) for read in chain.plan(range(4))] == [(1, range(4))]


def test_nothing_is_asked_of_row_sets_once_every_row_is_found() -> None:
    chain = Chain(4, 4).link((range(4), ALL, [range(4)])).link((range(4), ALL, [[0, 2], range(4)]))

    def never(link: int, part: ShardEntries, rowset: int) -> npt.NDArray[np.int64]:
        raise AssertionError("a row set was read")

    assert len(list(plan_reads(chain.links, WEIGHT, range(4), ALL, never))) == 1


def test_only_wanted_rows_are_read_with_positions_in_the_whole_entry() -> None:
    chain = Chain(100, 4).link((range(50), ALL, [range(50)]), (range(50, 100), ALL, [range(50)]))
    chain.link((range(50, 100), ALL, [[0, 10, 20, 30]]))
    delta, *base = chain.plan(range(45, 75))
    assert delta.positions == slice(0, 3)
    np.testing.assert_array_equal(delta.rows, [50, 60, 70])
    assert sorted(str(read.positions) for read in base if isinstance(read.positions, slice)) == ["slice(45, 50, None)"]
    applied = chain.applied([delta, *base])
    np.testing.assert_array_equal(applied[45:75], chain.newest[45:75])
    assert (applied[:45] == -1).all()
    assert (applied[75:] == -1).all()


def test_positions_count_from_the_entrys_first_record_where_newer_links_take_some_rows() -> None:
    chain = Chain(10, 4).link((range(10), ALL, [range(10)])).link((range(10), ALL, [[0, 2, 4, 6, 8]]))
    chain.link((range(10), ALL, [[4]]))
    newest, older, base = chain.plan(range(3, 9))
    assert (newest.positions, base.link) == (slice(0, 1), 0)
    np.testing.assert_array_equal(older.positions, [3, 4])
    np.testing.assert_array_equal(older.rows, [6, 8])
    np.testing.assert_array_equal(base.positions, [3, 5, 7])


def test_column_shards_are_read_apart_and_only_where_wanted() -> None:
    chain = Chain(4, 4).link((range(4), range(2), [range(4)]), (range(4), range(2, 4), [range(4)]))
    chain.link((range(4), range(2), [[1]]), (range(4), range(2, 4), [[1]]))
    assert [(read.link, read.cols) for read in chain.plan(range(4))] == [
        (1, range(2)),
        (0, range(2)),
        (1, range(2, 4)),
        (0, range(2, 4)),
    ]
    assert {read.cols for read in chain.plan(range(4), range(1, 2))} == {range(1, 2)}


def test_links_that_cut_the_columns_differently_are_read_by_segments() -> None:
    chain = (
        Chain(4, 4).link((range(4), ALL, [range(4)])).link((range(4), range(1), [[0]]), (range(4), range(1, 4), [[1]]))
    )
    reads = chain.plan(range(4))
    np.testing.assert_array_equal(chain.applied(reads), chain.newest)
    assert {read.cols for read in reads} == {range(1), range(1, 4)}


def test_replicas_of_one_row_are_read_once() -> None:
    chain = Chain(4, 4).link((range(4), ALL, [range(4)]), (range(4), ALL, [range(4)]))
    assert len(chain.plan(range(4))) == 1


def test_fields_are_planned_apart() -> None:
    chain = Chain(4, 4).link((range(4), ALL, [range(4)])).link((range(4), ALL, [[2]]))
    assert [read.entry.field for read in chain.plan(range(4), field=STATE)] == [STATE, STATE]


@pytest.mark.parametrize(
    ("rows", "cols", "count", "first"),
    [(range(4), ALL, 2, 1), (range(2, 4), ALL, 1, 2), (range(4), range(3, 5), 4, 0), (range(3, 6), ALL, 2, 4)],
)
def test_rows_that_no_link_carries_are_missing(rows: range, cols: range, count: int, first: int) -> None:
    chain = Chain(8, 6).link((range(4), ALL, [[0, 3]]))
    with pytest.raises(MissingRows, match=f"row {first}") as caught:
        chain.plan(rows, cols) if cols is ALL else chain.plan(rows, range(4, 5))
    assert (caught.value.count, caught.value.first) == (count, first)


def test_a_field_that_no_link_carries_or_an_empty_chain_is_missing() -> None:
    chain = Chain(4, 4).link((range(4), ALL, [range(4)]))
    with pytest.raises(MissingRows):
        chain.plan(range(4), field="exp_avg")
    with pytest.raises(MissingRows):
        Chain(4, 4).plan(range(4))


def test_nothing_wanted_is_nothing_read() -> None:
    chain = Chain(4, 4).link((range(4), ALL, [range(4)]))
    assert chain.plan(range(2, 2)) == []
    assert list(plan_reads(chain.links, WEIGHT, range(4), range(2, 2), chain.row_ids)) == []


def cuts(draw: Any, size: int) -> list[range]:
    inner = draw(st.sets(st.integers(1, size - 1), max_size=2))
    edges = [0, *sorted(inner), size]
    return [range(start, stop) for start, stop in pairwise(edges)]


@st.composite
def chains(draw: Any) -> Chain:
    chain = Chain(12, 4)
    for link in range(draw(st.integers(1, 4))):
        parts = []
        for rows in cuts(draw, 12):
            for cols in cuts(draw, 4):
                entries: list[Rows] = [range(len(rows))] if link == 0 else []
                for _ in range(draw(st.integers(0, 2))):
                    ids = sorted(draw(st.sets(st.integers(0, len(rows) - 1))))
                    whole = ids and draw(st.booleans())
                    entries.append(range(ids[0], ids[-1] + 1) if whole else ids)
                parts.append((rows, cols, entries))
        chain.link(*parts)
    return chain


@settings(max_examples=80, deadline=None, database=None)
@given(
    chain=chains(),
    rows=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    cols=st.sampled_from([range(4), range(1, 3), range(3, 4), range(2)]),
)
def test_reads_give_what_applying_the_links_in_order_gives(chain: Chain, rows: tuple[int, int], cols: range) -> None:
    wanted = range(min(rows), max(rows))
    for field in (WEIGHT, STATE):
        applied = chain.applied(chain.plan(wanted, cols, field))
        cells = np.ix_(np.array(wanted, dtype=np.int64), np.array(cols))
        np.testing.assert_array_equal(applied[cells], chain.newest[cells])
        applied[cells] = -1
        assert (applied == -1).all()
