"""A stream gives the rows of the moment at which it was made, whatever changes them meanwhile (I6, I7)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from incremental_ckpt import SaveError
from incremental_ckpt.model import Field, Shard, Table
from incremental_ckpt.snapshot import Part
from incremental_ckpt.stream import RowStream
from incremental_ckpt.tracker import Tracker

TIMEOUT = 60.0
ROOM = 1 << 30


def make_tables(*heights: int, seed: int = 0) -> list[Table]:
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for index, rows in enumerate(heights):
        fields = (Field("weight", "float32", 3), Field("sum", "float32", 1), Field("step", "int64", 1))
        tensors = {
            "weight": torch.rand(rows, 3, generator=generator),
            "sum": torch.rand(rows, 1, generator=generator),
            "step": torch.zeros(rows, 1, dtype=torch.int64),
        }
        tables.append(Table(Shard(f"t{index}", rows, 3, 0, rows, 0, 3, fields), tensors, True))
    return tables


def copies(tables: Sequence[Table]) -> list[dict[str, torch.Tensor]]:
    return [{name: t.clone() for name, t in table.tensors.items()} for table in tables]


def change(table: Table, rows: torch.Tensor) -> None:
    """What an optimizer does: all fields of a row, one after the other."""
    for tensor in table.tensors.values():
        tensor[rows.long()] += 1


class Training:
    """Changes rows through a tracker that tells a stream of the first touches."""

    def __init__(self, tables: list[Table], *, device_path: bool = False) -> None:
        self.tables = tables
        self.tracker = Tracker(tables)
        if device_path:
            self.tracker._numpy = [None] * len(tables)

    def stream(
        self, *, base: bool = True, kind: Callable[..., RowStream] = RowStream, limit: int = ROOM, **sizes: int
    ) -> RowStream:
        rows = self.tracker.freeze(everything=base)
        sizes = {"pack_bytes": 256, "entry_bytes": 64, **sizes}
        stream = kind(self.tables, rows, limit=limit, **sizes)
        self.tracker.tell_first_touches(stream, self.tracker.frozen_interval(everything=base))
        return stream

    def step(self, table: int, rows: torch.Tensor) -> None:
        self.tracker.mark(table, rows)
        change(self.tables[table], rows)


class Read:
    """Puts together what a stream gives, as a resume would: overriding parts last."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._parts: list[tuple[bool, Part]] = []
        self.items = 0

    def add(self, packful: list[Part], overriding: bool) -> None:
        self.items += 1
        for part in packful:
            rows = part.rows if isinstance(part.rows, range) else part.rows.copy()
            self._parts.append((overriding, Part(part.table, rows, tuple(f.copy() for f in part.fields))))

    @property
    def spilled_rows(self) -> int:
        return sum(len(part.rows) for overriding, part in self._parts if overriding)

    def rows(self) -> list[dict[str, torch.Tensor]]:
        found = [{name: torch.full_like(t, -7) for name, t in table.tensors.items()} for table in self._tables]
        for _, part in sorted(self._parts, key=lambda one: one[0]):
            for field, values in zip(self._tables[part.table].shard.fields, part.fields, strict=True):
                target = found[part.table][field.name]
                rows = torch.from_numpy(np.asarray(part.rows))
                target[rows] = torch.from_numpy(values).view(target.dtype)
        return found


def same(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(a[k], b[k]) for a, b in zip(found, expected, strict=True) for k in b)


def drained(stream: RowStream, tables: Sequence[Table], between: Callable[[], None] = lambda: None) -> Read:
    read = Read(tables)
    for packful, overriding in stream.packfuls():
        read.add(packful, overriding)
        between()
    return read


class InterruptedStream(RowStream):
    """Lets a test act just before and just after each field of each chunk is copied."""

    act: Callable[[], None]

    def _copy_chunk(self, live: torch.Tensor, rows: Any, target: torch.Tensor) -> None:
        self.act()
        super()._copy_chunk(live, rows, target)
        self.act()


@pytest.mark.parametrize("device_path", [False, True])
@pytest.mark.parametrize("limit", [ROOM, 600])
@pytest.mark.parametrize("base", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_every_interleaving_gives_the_rows_of_the_beginning(
    seed: int, base: bool, limit: int, device_path: bool
) -> None:
    choices = random.Random(seed)
    tables = make_tables(40, 1, 23, 0, seed=seed)
    training = Training(tables, device_path=device_path)
    for at in (0, 1, 2):
        training.step(at, torch.tensor([choices.randrange(tables[at].shard.rows) for _ in range(12)]))
    frozen = [t.clone() for t in Tracker.freeze(training.tracker)]  # type: ignore[union-attr]
    training.tracker.give_back()
    before = copies(tables)

    def act() -> None:
        if choices.random() < 0.5 and stream._old_bytes < limit // 2:  # nobody else could free room meanwhile
            at = choices.choice([0, 0, 1, 2])
            rows = [choices.randrange(tables[at].shard.rows) for _ in range(choices.randint(1, 4))]
            training.step(at, torch.tensor(rows, dtype=choices.choice([torch.int32, torch.int64])))

    InterruptedStream.act = staticmethod(act)  # type: ignore[assignment]
    stream = training.stream(base=base, kind=InterruptedStream, limit=limit)
    read = drained(stream, tables, act)
    found = read.rows()
    if not base:
        for at, rows in enumerate(frozen):
            for name, tensor in found[at].items():
                kept = tensor[rows].clone()
                tensor.fill_(-7)
                before_rows = before[at][name][rows].clone()
                before[at][name].fill_(-7)
                tensor[rows], before[at][name][rows] = kept, before_rows
    assert same(found, before)
    assert not same(copies(tables), before)
    assert stream.ended
    assert stream._old_bytes == 0


def test_every_row_is_streamed_in_packfuls_of_about_the_size_asked_for() -> None:
    tables = make_tables(200, 5)
    stream = Training(tables).stream(pack_bytes=512, entry_bytes=128)
    assert stream.rows == 205
    read = Read(tables)
    for packful, overriding in stream.packfuls():
        assert not overriding
        assert sum(p.nbytes for p in packful) <= 512
        assert all(f.nbytes <= 128 for p in packful for f in p.fields)
        read.add(packful, overriding)
    assert same(read.rows(), copies(tables))
    assert read.items > 6


@pytest.mark.parametrize("limit", [1, 400, 4000, ROOM])
@pytest.mark.parametrize("seed", range(3))
def test_a_training_thread_that_runs_freely_beside_the_stream_changes_nothing_in_it(seed: int, limit: int) -> None:
    tables = make_tables(250, 90, seed=seed)
    training = Training(tables)
    before = copies(tables)
    stream = training.stream(limit=limit)
    generator = torch.Generator().manual_seed(seed)
    started = threading.Event()

    def train() -> None:
        started.set()
        while not stream.ended:
            for at in (0, 1):
                training.step(at, torch.randint(0, tables[at].shard.rows, (16,), generator=generator))

    thread = threading.Thread(target=train)
    thread.start()
    started.wait(TIMEOUT)
    read = drained(stream, tables)
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert same(read.rows(), before)


class Noticing(threading.Condition):
    """Says when somebody begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting.set()
        return super().wait(timeout)


def blocked_training(limit: int, rows: Sequence[int]) -> tuple[Training, RowStream, threading.Thread]:
    """A training thread whose second batch finds no room for its old values; 28 bytes a row with its id."""
    training = Training(make_tables(400))
    stream = training.stream(limit=limit)
    stream._changed = noticing = Noticing()

    def train() -> None:
        training.step(0, torch.arange(200, 200 + rows[0]))
        training.step(0, torch.arange(300, 300 + rows[1]))

    thread = threading.Thread(target=train)
    thread.start()
    assert noticing.waiting.wait(TIMEOUT)
    return training, stream, thread


@pytest.mark.parametrize("rows", [(10, 1), (4, 7)])
def test_training_that_waits_for_room_goes_on_after_the_next_packful(rows: tuple[int, int]) -> None:
    """Also where the old values are below the size at which they are spilled anyway (4 and 7 of 10)."""
    training, stream, thread = blocked_training(limit=10 * 32, rows=rows)
    read = Read(training.tables)
    before = copies(training.tables)
    before[0] = {k: t.clone() for k, t in before[0].items()}
    for name, tensor in before[0].items():
        tensor[200 : 200 + rows[0]] -= 1 if name == "step" else 1.0
    items = stream.packfuls()
    while thread.is_alive() and read.items < 6:
        read.add(*next(items))
        thread.join(0.2)
    assert not thread.is_alive(), "training waits for the end of the stream"
    assert read.spilled_rows == rows[0]
    for packful, overriding in items:
        read.add(packful, overriding)
    assert all(torch.allclose(a, b) for a, b in zip(read.rows()[0].values(), before[0].values(), strict=True))


def test_the_end_of_a_stream_releases_training_that_waits_for_room() -> None:
    _, stream, thread = blocked_training(limit=10 * 32, rows=(10, 1))
    stream.end()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert stream._old_bytes == 0


def test_one_batch_larger_than_the_whole_limit_passes() -> None:
    training = Training(make_tables(400))
    before = copies(training.tables)
    stream = training.stream(limit=1)
    training.step(0, torch.arange(50, 390))
    read = drained(stream, training.tables)
    assert same(read.rows(), before)
    assert read.spilled_rows > 0


def test_old_values_that_are_written_take_no_memory_beside_the_buffer_of_the_stream() -> None:
    training = Training(make_tables(400))
    stream = training.stream(pack_bytes=32 * 40, limit=32 * 100)
    before = copies(training.tables)
    items = stream.packfuls()
    read = Read(training.tables)
    first, _ = next(items)
    buffer, copied = first[0].fields[0], stream._watermarks[0]
    read.add(first, False)
    for begin in range(300, 380, 5):
        training.step(0, torch.arange(begin, begin + 5))
    held = stream._old_bytes
    spilled, overriding = next(items)
    assert overriding
    assert copied < 300
    assert held - stream._old_bytes <= 32 * 40
    in_buffer = range(buffer.ctypes.data, buffer.ctypes.data + 32 * 40)
    assert all(field.ctypes.data in in_buffer for part in spilled for field in part.fields)
    read.add(spilled, True)
    for packful, overrides in items:
        read.add(packful, overrides)
    assert same(read.rows(), before)


def test_old_values_below_the_watermark_are_not_kept() -> None:
    training = Training(make_tables(100))
    stream = training.stream(pack_bytes=256)
    items = stream.packfuls()
    next(items)
    copied = stream._watermarks[0]
    assert 0 < copied < 90
    training.step(0, torch.arange(0, copied))
    assert stream._old_bytes == 0
    training.step(0, torch.arange(copied, copied + 3))
    assert stream._old_bytes > 0


@pytest.mark.parametrize("when", [0, 3])
def test_a_change_that_nobody_announced_fails_the_stream(when: int) -> None:
    training = Training(make_tables(100, 3))
    stream = training.stream()
    items = stream.packfuls()
    for _ in range(when):
        next(items)
    training.tracker.mark_all(0)
    with pytest.raises(SaveError, match="t0"):
        list(items)


def test_a_change_that_is_noticed_after_the_table_was_passed_fails_the_stream_too() -> None:
    """It is noticed late (at the next optimizer step): what was copied in between is already wrong."""
    training = Training(make_tables(8, 200))
    stream = training.stream()
    items = stream.packfuls()
    while stream._watermarks[0] < 8:
        next(items)
    training.tracker.mark_all(0)
    with pytest.raises(SaveError, match="t0"):
        list(items)


def test_a_stream_of_no_rows_ends_at_once() -> None:
    training = Training(make_tables(5))
    stream = training.stream(base=False)
    assert list(stream.packfuls()) == []
    assert stream.ended
