"""Tensors that are no plain numbers in memory come back, or are refused by name before anything is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapter_oracle import assert_same
from torch import nn

from incremental_ckpt import Checkpointer
from incremental_ckpt.errors import CheckpointError
from incremental_ckpt.storage import MemoryStore


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.zeros(6, 4), 0.1, 0, torch.quint8)


UNWRITABLE: dict[str, tuple[Any, str]] = {
    "meta": (lambda: torch.empty(6, 4, device="meta"), "is on the meta device"),
    "quantized": (quantized, "has the dtype torch.quint8"),
    "complex32": (lambda: torch.zeros(6, 4, dtype=torch.complex32), "has the dtype torch.complex32"),
    "float8": (lambda: torch.zeros(6, 4).to(torch.float8_e4m3fnuz), "has the dtype torch.float8_e4m3fnuz"),
    "sparse": (lambda: torch.zeros(6, 4).to_sparse(), "has the layout torch.sparse_coo"),
}


@pytest.mark.parametrize(("make", "words"), UNWRITABLE.values(), ids=UNWRITABLE.keys())
@pytest.mark.parametrize(("where", "name"), [("table", "table 'table'"), ("over", "'over.weight' of the model")])
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning")
def test_what_cannot_be_written_is_refused_by_name_when_the_checkpointer_is_made(
    make: Any, words: str, where: str, name: str, store_name: str
) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(6, 4, sparse=True), "over": nn.Linear(4, 6)})
    model[where].weight = nn.Parameter(make(), requires_grad=False)
    store = MemoryStore(store_name)
    with pytest.raises(CheckpointError, match=f"{name} {words}"):
        Checkpointer(model, store)
    assert [*store.list()] == []


def filled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(*shape) * 8).to(dtype)


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize(
    "dtype",
    [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.int8, torch.bool],
)
def test_tables_of_any_dtype_that_the_format_has_come_back(dtype: torch.dtype, codec: str, store_name: str) -> None:
    def model() -> nn.Module:
        table = nn.Embedding(6, 4)
        table.weight = nn.Parameter(filled(6, 4, dtype=dtype), requires_grad=False)
        return nn.ModuleDict({"table": table})

    one, other = model(), model()
    with Checkpointer(one, MemoryStore(store_name), codec=codec) as c:
        assert c.save_checkpoint(1).wait().rows == 6
    with Checkpointer(other, MemoryStore(store_name)) as c:
        c.resume_from_checkpoint()
    if codec == "raw" or dtype not in (torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
        assert_same(other.state_dict(), one.state_dict())


@pytest.mark.parametrize("shape", [(0, 4), (6, 0), (0, 0), (6,), (1, 1)])
@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.SparseAdam, torch.optim.SGD])
def test_tables_without_rows_or_columns_come_back_with_their_optimizers(
    shape: tuple[int, ...], make: Any, store_name: str
) -> None:
    def run() -> tuple[nn.Module, torch.optim.Optimizer]:
        table = nn.Embedding(6, 4, sparse=True)
        table.weight = nn.Parameter(torch.rand(*shape))
        model = nn.ModuleDict({"table": table, "other": nn.Embedding(5, 2, sparse=True)})
        return model, make([*model.parameters()], lr=0.1)

    model, optimizer = run()
    with Checkpointer(model, MemoryStore(store_name), optimizer=optimizer, kind="consecutive") as c:
        for number in range(3):
            model["other"](torch.tensor([number])).cos().sum().backward()
            optimizer.step()
            info = c.save_checkpoint(number).wait()
    assert info.kind == "delta"
    again, its_optimizer = run()
    with Checkpointer(again, MemoryStore(store_name), optimizer=its_optimizer) as c:
        assert c.resume_from_checkpoint() is not None
    assert_same(again.state_dict(), model.state_dict())
    assert_same(its_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.SparseAdam, torch.optim.SGD])
def test_tables_whose_columns_lie_together_come_back(make: Any, store_name: str) -> None:
    def run() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({"table": nn.Embedding(6, 4, sparse=True)})
        model["table"].weight = nn.Parameter(torch.rand(4, 6).t())
        return model, make([*model.parameters()], lr=0.1)

    model, optimizer = run()
    with Checkpointer(model, MemoryStore(store_name), optimizer=optimizer, kind="consecutive") as c:
        for number in range(3):
            model["table"](torch.tensor([number])).cos().sum().backward()
            optimizer.step()
            c.save_checkpoint(number).wait()
    again, its_optimizer = run()
    with Checkpointer(again, MemoryStore(store_name), optimizer=its_optimizer) as c:
        assert c.resume_from_checkpoint() is not None
    assert torch.equal(again["table"].weight, model["table"].weight)
    assert_same(its_optimizer.state_dict(), optimizer.state_dict())


def test_optimizer_state_that_cannot_be_written_is_named(store_name: str) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(6, 4, sparse=True)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # of sparse gradients it keeps sparse sums
    with Checkpointer(model, MemoryStore(store_name), optimizer=optimizer) as c:
        model["table"](torch.tensor([1])).cos().sum().backward()
        optimizer.step()
        words = "'momentum_buffer' of 'table.weight' in optimizer '0' has the layout torch.sparse_coo"
        with pytest.raises(CheckpointError, match=words):
            c.save_checkpoint(1)
