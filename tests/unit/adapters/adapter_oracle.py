"""What the adapters' tests share: a difference oracle for marks, and the way of a checkpoint without a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from incremental_ckpt.adapters import adapt
from incremental_ckpt.model import ModelAdapter


class Watched:
    """A watched model with its marks, and the rows that have really changed since ``begin``."""

    def __init__(self, model: nn.Module, optimizer: object = None) -> None:
        self.adapter = adapt(model, optimizer)
        self.marked: dict[int, set[int]] = {}
        self.whole: set[int] = set()
        self.adapter.watch(self._mark, self.whole.add)
        self.begin()

    def begin(self) -> None:
        self.before = [{k: v.clone() for k, v in t.tensors.items()} for t in self.adapter.tables()]
        self.marked.clear()
        self.whole.clear()

    def changed(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for index, table in enumerate(self.adapter.tables()):
            rows: set[int] = set()
            for name, now in table.tensors.items():
                then = self.before[index].get(name, torch.zeros_like(now))
                differ = (now != then) & ~(now.isnan() & then.isnan())
                rows |= set(differ.any(1).nonzero().flatten().tolist())
            if rows:
                found[index] = rows
        return found

    def _mark(self, table: int, rows: torch.Tensor) -> None:
        assert rows.dtype in (torch.int32, torch.int64)
        assert rows.dim() == 1
        self.marked.setdefault(table, set()).update(rows.tolist())


Saved = tuple[dict[str, Sequence[Any]], list[tuple[tuple[str, int, int], dict[str, torch.Tensor]]], Mapping[str, Any]]


def save(adapter: ModelAdapter) -> Saved:
    """All that a checkpoint carries, copied."""
    tables = adapter.tables()
    fields = {t.shard.table: t.shard.fields for t in tables}
    rows = [
        ((t.shard.table, t.shard.row_start, t.shard.col_start), {k: v.clone() for k, v in t.tensors.items()})
        for t in tables
    ]
    return fields, rows, deepcopy(adapter.state())


def restore(adapter: ModelAdapter, saved: Saved) -> None:
    fields, rows, state = saved
    differ = adapter.differences(fields, state)
    assert not differ, differ
    prepared = adapter.prepare_restore(fields, state)
    tables = {(t.shard.table, t.shard.row_start, t.shard.col_start): t for t in prepared}
    assert tables.keys() == {place for place, _ in rows}
    for place, tensors in rows:
        assert tables[place].tensors.keys() == tensors.keys()
        for name, value in tensors.items():
            tables[place].tensors[name].copy_(value)
    adapter.load_state(deepcopy(state))


def texts(adapter: ModelAdapter, state: Mapping[str, Any], *, fatal: bool = False) -> list[str]:
    """How a model differs from a saved state without tables; the ``fatal`` differences only, if so."""
    return [d.text for d in adapter.differences({}, state) if d.fatal or not fatal]


def assert_same(a: object, b: object, path: str = "state") -> None:
    """Equal in structure, type and every bit."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), path
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), path
        assert (
            torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
            if a.dim()
            else (a.item() == b.item())
        ), path
    elif isinstance(a, Mapping):
        assert isinstance(b, Mapping), path
        assert set(a) == set(b), path
        for key in a:
            assert_same(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert isinstance(b, list | tuple), path
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{index}]")
    else:
        assert a == b, path
        assert type(a) is type(b), path
