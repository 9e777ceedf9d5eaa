"""The host copy is exact, reuses its memory, and keeps nothing that training changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from incremental_ckpt import SaveError
from incremental_ckpt.model import Field, Shard, Table
from incremental_ckpt.snapshot import HostArena, RowCopies, copied_bytes, flatten_state


def make_table(rows: int, dtype: torch.dtype = torch.float32, cols: int = 3) -> Table:
    name = str(dtype).removeprefix("torch.")
    shard = Shard("t", rows, cols, 0, rows, 0, cols, (Field("weight", name, cols), Field("count", "int64", 1)))
    weight = torch.arange(rows * cols).reshape(rows, cols).to(dtype)
    return Table(shard, {"weight": weight, "count": torch.arange(rows).reshape(rows, 1)}, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("rows", [None, [0], [1, 5, 6], list(range(11))])
def test_copies_are_the_rows_of_the_call_with_all_their_fields(dtype: torch.dtype, rows: list[int] | None) -> None:
    table = make_table(11, dtype)
    chosen = None if rows is None else torch.tensor(rows)
    before = table.tensors["weight"].clone()
    arena = HostArena(pinned=False)
    arena.reserve(copied_bytes([table], [chosen]))
    copies = RowCopies([table], [chosen], arena)
    for tensor in table.tensors.values():
        tensor.zero_()
    (packful,) = copies.packfuls(1 << 20, 1 << 20)
    (part,) = packful
    at = np.asarray(part.rows)
    assert at.tolist() == (list(range(11)) if rows is None else rows)
    assert torch.equal(torch.from_numpy(part.fields[0].copy()).view(dtype), before[torch.from_numpy(at)])
    assert part.fields[1].view(np.int64).squeeze(1).tolist() == at.tolist()


def test_copies_are_given_out_in_packfuls_of_parts_of_the_sizes_asked_for() -> None:
    table = make_table(100)
    arena = HostArena(pinned=False)
    arena.reserve(copied_bytes([table, table], [None, None]))
    copies = RowCopies([table, table], [None, None], arena)
    packfuls = list(copies.packfuls(400, 120))
    assert all(sum(p.nbytes for p in packful) <= 400 for packful in packfuls)
    assert all(f.nbytes <= 120 for packful in packfuls for p in packful for f in p.fields)
    assert [(p.table, r) for packful in packfuls for p in packful for r in p.rows] == [
        (t, r) for t in range(2) for r in range(100)
    ]


def test_the_arena_grows_to_the_largest_snapshot_and_is_then_used_again() -> None:
    arena = HostArena(pinned=False)
    places = set()
    for size in (100, 5000, 70, 5000, 3):
        arena.reserve(size)
        block = arena.take(size)
        assert block.data_ptr() % 64 == 0
        if size == 5000:
            places.add(block.data_ptr())
    assert len(places) == 1
    arena.release()
    assert arena.nbytes == 0


def test_state_is_copied_deeply_whatever_its_layout() -> None:
    storage = torch.arange(24.0).reshape(4, 6)
    shared = torch.ones(2)
    state = {
        "transposed": storage.t()[1:3], "scalar": torch.tensor(5), "none": torch.empty(0, 3),
        "complex": torch.tensor([1j]), "tied": [shared, shared],
        "array": np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2], "plain": {"n": 1},
    }  # fmt: skip
    flat = flatten_state({"user": state})
    arena = HostArena(pinned=False)
    arena.reserve(flat.arena_bytes)
    (copy,) = flat.copy(arena)
    expected = [storage.t()[1:3].clone(), torch.tensor(5), torch.empty(0, 3), torch.tensor([1j]), torch.ones(2)]
    storage.zero_()
    shared.zero_()
    state["plain"]["n"] = 2  # type: ignore[index]
    for found, tensor in zip(copy.tensors, expected, strict=False):
        assert (found.dtype, found.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert bytes(found.bytes) == tensor.contiguous().numpy().tobytes()
    assert bytes(copy.tensors[5].bytes) == np.array([[0, 2], [3, 5]], dtype="<i4").tobytes()
    assert len(copy.tensors) == 6, "a tied tensor is copied once"
    assert copy.tree["plain"] == {"n": 1}


@pytest.mark.parametrize("value", [object(), torch.eye(2).to_sparse(), {"deep": [lambda: None]}])
def test_what_cannot_be_written_without_pickle_is_refused_by_its_path(value: object) -> None:
    with pytest.raises(SaveError, match=r"reader|sparse"):
        flatten_state({"reader": {"member": value}})
