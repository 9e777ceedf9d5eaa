"""A host copy of the frozen rows and of the state, taken within the stall: rows are gathered on their device, then
copied to reused host memory.

It must not know the tracker, codecs or stores. What is too large to copy at once is streamed: see stream.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from incremental_ckpt.errors import SaveError
from incremental_ckpt.format.tree import to_tree
from incremental_ckpt.model import DTYPE_BYTES, Table

_ALIGN = 64
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Part:
    """Some rows of one table with all their fields.

    Attributes:
        table: index of the table.
        rows: local ids: a range, or ascending int64.
        fields: per field of the shard, in its order, ``uint8 [rows, field.row_bytes]``.
    """

    table: int
    rows: range | np.ndarray
    fields: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.fields)


@dataclass(frozen=True)
class StateTensorCopy:
    """One tensor of the state in host memory: dtype by torch's name, and its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    bytes: memoryview


@dataclass(frozen=True)
class StateCopy:
    """One named tree of state with its tensors, safe from training."""

    name: str
    tree: Any
    tensors: tuple[StateTensorCopy, ...]


class HostArena:
    """Host memory that one snapshot after another is copied into, so that no page is faulted in twice. Pinned where a
    GPU is used.

    It grows to the largest snapshot and is given back by ``release``.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def reserve(self, nbytes: int) -> None:
        """Start over with room for ``nbytes``. What was taken before must not be used any more."""
        self._used = 0
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before taking the new
            size = (nbytes + nbytes // 8 + _PAGE) // _PAGE * _PAGE
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def take(self, nbytes: int) -> torch.Tensor:
        """The next ``nbytes`` as ``uint8 [nbytes]``, aligned to 64 bytes."""
        begin = self._used
        self._used = (begin + nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
        assert begin + nbytes <= self._memory.numel(), "reserve() was given too little"
        return self._memory[begin : begin + nbytes]

    def release(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)


def room(sizes: Sequence[int]) -> int:
    """Bytes that ``HostArena.take`` needs for blocks of these sizes."""
    return sum((size + _ALIGN - 1) // _ALIGN * _ALIGN for size in sizes)


Rows = range | torch.Tensor | None
"""Rows of a table, local ids: a range, ascending int64 on the table's device, or None for all."""


def ids_of(table: Table, rows: Rows) -> range | torch.Tensor:
    return range(table.shard.rows) if rows is None else rows


class RowCopies:
    """Copies of changed rows: gathered on the device of each table, copied to the arena.

    On a GPU the copy to pinned memory runs on a side stream behind the gather; training need not wait for it.
    """

    def __init__(self, tables: Sequence[Table], rows: Sequence[Rows], arena: HostArena) -> None:
        self._parts: list[tuple[int, range | torch.Tensor, list[torch.Tensor]]] = []
        self._events: list[torch.cuda.Event] = []
        self._side_streams: dict[torch.device, torch.cuda.Stream] = {}
        for index, (table, wanted) in enumerate(zip(tables, rows, strict=True)):
            ids = ids_of(table, wanted)
            count = len(ids)
            if count == 0:
                continue
            copies = []
            for field in table.shard.fields:
                live = table.tensors[field.name]
                target = arena.take(count * field.row_bytes).view(live.dtype).view(count, field.width)
                self._copy(live, ids, target)
                copies.append(target)
            self._parts.append((index, ids, copies))
        for stream in self._side_streams.values():
            self._events.append(stream.record_event())

    def _copy(self, live: torch.Tensor, ids: range | torch.Tensor, target: torch.Tensor) -> None:
        live = live.detach()
        if live.device.type == "cpu":
            if isinstance(ids, range):
                target.copy_(live[ids.start : ids.stop])
            else:
                torch.index_select(live, 0, ids, out=target)
            return
        gathered = live[ids.start : ids.stop].clone() if isinstance(ids, range) else live.index_select(0, ids)
        side = self._side_streams.setdefault(live.device, torch.cuda.Stream(live.device))
        side.wait_stream(torch.cuda.current_stream(live.device))
        with torch.cuda.stream(side):
            target.copy_(gathered, non_blocking=True)
        gathered.record_stream(side)

    @property
    def rows(self) -> int:
        return sum(len(ids) for _, ids, _ in self._parts)

    def packfuls(self, pack_bytes: int, entry_bytes: int) -> Iterator[list[Part]]:
        """The copies in lists of parts of about ``pack_bytes``; waits for the copies from a device. Background
        thread."""
        for event in self._events:
            event.synchronize()
        packful: list[Part] = []
        size = 0
        for table, ids, copies in self._parts:
            host_ids = ids if isinstance(ids, range) else ids.cpu().numpy()
            arrays = [c.view(torch.uint8).numpy().reshape(c.shape[0], -1) for c in copies]
            step = rows_per_entry([a.shape[1] for a in arrays], entry_bytes)
            for begin in range(0, len(host_ids), step):
                part = Part(table, host_ids[begin : begin + step], tuple(a[begin : begin + step] for a in arrays))
                if packful and size + part.nbytes > pack_bytes:
                    yield packful
                    packful, size = [], 0
                packful.append(part)
                size += part.nbytes
        if packful:
            yield packful


def rows_per_entry(row_bytes: Sequence[int], entry_bytes: int) -> int:
    """How many rows make an entry of at most ``entry_bytes`` in the widest field."""
    return max(1, entry_bytes // max(1, *row_bytes))


def copied_bytes(tables: Sequence[Table], rows: Sequence[Rows]) -> int:
    """Arena bytes that RowCopies needs for these rows."""
    sizes = []
    for table, wanted in zip(tables, rows, strict=True):
        sizes += [len(ids_of(table, wanted)) * field.row_bytes for field in table.shard.fields]
    return room(sizes)


@dataclass(frozen=True)
class FlatState:
    """State taken apart but not copied yet: trees of plain values, and the live tensors and arrays that they refer
    to."""

    trees: tuple[tuple[str, Any, tuple[torch.Tensor | np.ndarray, ...]], ...]

    @property
    def arena_bytes(self) -> int:
        return room([_nbytes(leaf) for _, _, leaves in self.trees for leaf in leaves])

    def copy(self, arena: HostArena) -> tuple[StateCopy, ...]:
        """Copy every tensor; a tensor on a GPU is waited for (they are small)."""
        return tuple(
            StateCopy(name, tree, tuple(_copy_leaf(leaf, arena) for leaf in leaves))
            for name, tree, leaves in self.trees
        )


def flatten_state(state: Mapping[str, Any]) -> FlatState:
    """Take nested state apart.

    Raises:
        SaveError: naming the path of what cannot be written without pickle.
    """
    return FlatState(
        tuple((name, *_as_tuple(to_tree(value, path=name, as_tensor=_as_tensor))) for name, value in state.items())
    )


def _as_tuple(flat: tuple[Any, list[object]]) -> tuple[Any, tuple[Any, ...]]:
    return flat[0], tuple(flat[1])


def _as_tensor(value: object) -> object | None:
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout is not torch.strided or value.is_quantized or dtype_name(value.dtype) not in DTYPE_BYTES:
        raise SaveError(
            f"a tensor of layout {value.layout} and dtype {value.dtype} in the state cannot be written; "
            "keep it out of state_dict(), or convert it to a dense tensor of a plain dtype there"
        )
    return value.detach()


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def torch_value(tag: str, value: Any) -> object:
    """What `from_tree` needs to make torch's own values. Raises ValueError for a dtype that is none."""
    if tag == "$size":
        return torch.Size(value)
    if tag == "$device":
        return torch.device(value)
    dtype = getattr(torch, value, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no such dtype: {value!r}")  # noqa: TRY004 - a wrong value of the right type
    return dtype


def _nbytes(leaf: torch.Tensor | np.ndarray) -> int:
    return leaf.nbytes


def _copy_leaf(leaf: torch.Tensor | np.ndarray, arena: HostArena) -> StateTensorCopy:
    if isinstance(leaf, np.ndarray):
        little = np.ascontiguousarray(leaf, dtype=leaf.dtype.newbyteorder("<")).reshape(leaf.shape)
        target = arena.take(little.nbytes)
        target.numpy()[:] = np.frombuffer(little.tobytes(), dtype=np.uint8)
        return StateTensorCopy(leaf.dtype.name, leaf.shape, target.numpy().data)
    target = arena.take(leaf.nbytes)
    if leaf.numel():
        if leaf.device.type == "cpu" and leaf.is_contiguous() and not (leaf.is_conj() or leaf.is_neg()):
            # Not torch's copy_: it wakes a thread pool for what takes microseconds.
            np.copyto(target.numpy(), leaf.reshape(-1).view(torch.uint8).numpy())
        else:
            target.view(leaf.dtype).view(leaf.shape).copy_(leaf)
    return StateTensorCopy(dtype_name(leaf.dtype), tuple(leaf.shape), target.numpy().data)
