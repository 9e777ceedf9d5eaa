"""Marks are dropped only by what confirms them, whatever the order of marks, freezes and outcomes (I5)."""

from __future__ import annotations

import random

import pytest
import torch

import incremental_ckpt.tracker as tracker_module
from incremental_ckpt.model import Field, Shard, Table
from incremental_ckpt.tracker import Interval, Tracker


def table(rows: int, name: str = "t", *, tracked: bool = True) -> Table:
    weight = torch.zeros(rows, 2)
    shard = Shard(name, rows, 2, 0, rows, 0, 2, (Field("weight", "float32", 2),))
    return Table(shard, {"weight": weight}, tracked)


def ids(*rows: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


def frozen(tracker: Tracker, *, everything: bool = False) -> list[list[int] | None]:
    rows = tracker.freeze(everything=everything)
    assert all(r is None or r.dtype == torch.int64 for r in rows)
    return [None if r is None else r.tolist() for r in rows]


class Touches:
    """Remembers the first touches that it is told of, and the marks as they were then."""

    def __init__(self) -> None:
        self.ended = False
        self.rows: list[tuple[int, list[int]]] = []
        self.spoiled: list[int] = []

    def take(self, table: int, rows: torch.Tensor, first: torch.Tensor | None) -> None:
        self.rows.append((table, (rows if first is None else rows[first].unique()).tolist()))

    def spoil(self, table: int) -> None:
        self.spoiled.append(table)


def on_device(tracker: Tracker) -> Tracker:
    """The same tracker on the path that GPUs take: no numpy, masks instead of lists."""
    tracker._numpy = [None] * len(tracker._numpy)
    return tracker


def test_a_freeze_gives_the_marked_rows_once_each_and_ascending() -> None:
    tracker = Tracker([table(10), table(20)])
    tracker.mark(1, ids(19, 3, 3, 0))
    tracker.mark(0, ids(9))
    assert frozen(tracker) == [[9], [0, 3, 19]]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.6, 1.0])
@pytest.mark.parametrize("rows", [1, 8, 63, 64, 65, 1000])
def test_the_same_rows_are_found_whatever_the_blocks_and_the_share_of_marks(
    monkeypatch: pytest.MonkeyPatch, rows: int, share: float
) -> None:
    monkeypatch.setattr(tracker_module, "_BLOCK", 64)
    generator = torch.Generator().manual_seed(rows)
    tracker = Tracker([table(rows, "a"), table(3, "b"), table(rows, "c")])
    for _ in range(2):  # marks of a confirmed freeze are still in the map, and are not found again
        wanted = [torch.nonzero(torch.rand(n, generator=generator) < share).squeeze(1) for n in (rows, 3, rows)]
        for index, marked in enumerate(wanted):
            tracker.mark(index, marked[torch.randperm(len(marked), generator=generator)])
        assert frozen(tracker) == [marked.tolist() for marked in wanted]
        tracker.confirm()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("device_path", [False, True])
def test_ids_of_both_widths_are_taken(dtype: torch.dtype, device_path: bool) -> None:
    tracker = Tracker([table(10)])
    if device_path:
        on_device(tracker)
    tracker.mark(0, ids(7, 2, 7, dtype=dtype))
    tracker.mark(0, ids(dtype=dtype))
    assert frozen(tracker) == [[2, 7]]


def test_a_freeze_without_a_batch_since_the_last_is_empty() -> None:
    tracker = Tracker([table(10)])
    tracker.mark(0, ids(1))
    tracker.freeze()
    tracker.confirm()
    assert frozen(tracker) == [[]]


def test_confirmed_rows_are_dropped_and_those_marked_since_the_freeze_are_kept() -> None:
    tracker = Tracker([table(10)])
    tracker.mark(0, ids(1, 2))
    tracker.freeze()
    tracker.mark(0, ids(2, 3))
    tracker.confirm()
    assert frozen(tracker) == [[2, 3]]


def test_rows_given_back_are_in_the_next_freeze() -> None:
    tracker = Tracker([table(10)])
    tracker.mark(0, ids(1, 2))
    tracker.freeze()
    tracker.mark(0, ids(3))
    tracker.give_back()
    assert frozen(tracker) == [[1, 2, 3]]
    tracker.give_back()
    assert frozen(tracker) == [[1, 2, 3]]


def test_a_base_scans_nothing_and_drops_all_older_marks_only_when_it_is_confirmed() -> None:
    tracker = Tracker([table(10), table(5)])
    tracker.mark(0, ids(4))
    assert frozen(tracker, everything=True) == [None, None]
    tracker.give_back()
    assert frozen(tracker) == [[4], []]
    tracker.give_back()
    tracker.freeze(everything=True)
    tracker.mark(1, ids(2))
    tracker.confirm()
    assert frozen(tracker) == [[], [2]]


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 63, 64, 65])
def test_rows_of_neighbouring_tables_are_never_confused(rows: int) -> None:
    tracker = Tracker([table(rows), table(3), table(rows), table(1)])
    tracker.mark_all(1)
    tracker.mark_all(2)
    assert frozen(tracker) == [[], [0, 1, 2], list(range(rows)), []]


def test_untracked_tables_are_always_saved_whole_and_cost_no_marks() -> None:
    tracker = Tracker([table(9, tracked=False), table(9)])
    tracker.mark(0, ids(3))
    tracker.mark_all(0)
    tracker.mark(1, ids(8))
    assert frozen(tracker) == [None, [8]]
    assert tracker.map_bytes == 16


def test_a_reset_forgets_every_mark_and_an_unsettled_freeze() -> None:
    tracker = Tracker([table(9)])
    tracker.mark(0, ids(3))
    tracker.freeze()
    tracker.mark(0, ids(4))
    tracker.reset()
    assert frozen(tracker) == [[]]


def test_a_second_freeze_before_the_first_is_settled_is_a_mistake() -> None:
    tracker = Tracker([table(9)])
    tracker.freeze()
    with pytest.raises(AssertionError, match="I5"):
        tracker.freeze()


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_marks_and_outcomes_equals_sets_also_beyond_255_epochs(seed: int, device_path: bool) -> None:
    choices = random.Random(seed)
    heights = [13, 8, 1]
    tracker = Tracker([table(rows) for rows in heights])
    if device_path:
        on_device(tracker)
    kept: list[set[int]] = [set() for _ in heights]
    fresh: list[set[int]] = [set() for _ in heights]
    # Long stretches of failures and of commits: both run into the last epoch.
    for number in range(900):
        for _ in range(choices.randint(0, 2)):
            at = choices.randrange(3)
            rows = [choices.randrange(heights[at]) for _ in range(choices.randint(0, 3))]
            tracker.mark(at, ids(*rows))
            fresh[at].update(rows)
        if choices.random() < 0.02:
            tracker.mark_all(1)
            fresh[1].update(range(heights[1]))
        everything = choices.random() < 0.2
        expected = [sorted(k | f) for k, f in zip(kept, fresh, strict=True)]
        assert frozen(tracker, everything=everything) == ([None] * 3 if everything else expected)
        kept, fresh = [k | f for k, f in zip(kept, fresh, strict=True)], [set() for _ in heights]
        if choices.random() < (0.9 if number // 300 % 2 else 0.003):
            tracker.confirm()
            kept = [set() for _ in heights]
        else:
            tracker.give_back()


@pytest.mark.parametrize("device_path", [False, True])
def test_a_row_is_announced_once_before_its_first_change_since_the_freeze(device_path: bool) -> None:
    tracker = Tracker([table(10), table(10)])
    if device_path:
        on_device(tracker)
    touches = Touches()
    tracker.mark(0, ids(1))
    tracker.freeze(everything=True)
    tracker.tell_first_touches(touches, tracker.frozen_interval(everything=True))
    tracker.mark(0, ids(5, 1, 5))
    tracker.mark(0, ids(5, 6))
    tracker.mark(0, ids(1, 6))
    tracker.mark(1, ids(0))
    assert [(t, rows) for t, rows in touches.rows if rows] == [(0, [1, 5]), (0, [6]), (1, [0])]


def test_of_a_delta_only_the_frozen_rows_are_announced() -> None:
    tracker = Tracker([table(10)])
    tracker.mark(0, ids(1))
    tracker.freeze()
    tracker.confirm()
    tracker.mark(0, ids(2, 3))
    tracker.freeze()
    touches = Touches()
    tracker.tell_first_touches(touches, tracker.frozen_interval(everything=False))
    tracker.mark(0, ids(1, 2, 4))
    tracker.mark(0, ids(2, 3))
    assert touches.rows == [(0, [2]), (0, [3])]


def test_nobody_is_told_after_the_end() -> None:
    tracker = Tracker([table(10)])
    touches = Touches()
    tracker.freeze(everything=True)
    tracker.tell_first_touches(touches, tracker.frozen_interval(everything=True))
    touches.ended = True
    tracker.mark(0, ids(1))
    touches.ended = False
    tracker.tell_first_touches(None)
    tracker.mark(0, ids(2))
    assert touches.rows == []


def test_a_change_that_rows_do_not_tell_spoils_what_is_being_streamed() -> None:
    tracker = Tracker([table(10), table(10)])
    touches = Touches()
    tracker.freeze(everything=True)
    tracker.tell_first_touches(touches, Interval(0, 1))
    tracker.mark_all(1)
    assert touches.spoiled == [1]
