"""Rows come back with the optimizer state that belongs to them, or the resume is refused and says whose it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from adapter_oracle import assert_same
from torch import nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from incremental_ckpt import Checkpointer, MismatchError
from incremental_ckpt.storage import MemoryStore

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "RowWiseAdagrad": lambda p: RowWiseAdagrad(list(p), lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
}
FIELDS = {
    "Adagrad": "sum (float32[4])", "SparseAdam": "exp_avg (float32[4]), exp_avg_sq (float32[4])", "SGD": "nothing",
    "SGD momentum": "momentum_buffer (float32[4])", "Adam": "exp_avg (float32[4]), exp_avg_sq (float32[4])",
    "Adam amsgrad": "exp_avg (float32[4]), exp_avg_sq (float32[4]), max_exp_avg_sq (float32[4])",
    "RowWiseAdagrad": "sum (float32[1])", "NAdam": "exp_avg (float32[4]), exp_avg_sq (float32[4])",
}  # fmt: skip
SPARSE = ("Adagrad", "SparseAdam", "SGD")


def table(seed: int, name: str) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"user": nn.Embedding(10, 4, sparse=name in SPARSE)})


def step(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model["user"](torch.tensor([1, 2])).cos().sum().backward()
    optimizer.step()


def checkpointer(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, store: str, **arguments: Any
) -> Checkpointer:
    return Checkpointer(model, MemoryStore(store), optimizer={name: optimizer}, **arguments)


def saved(store: str, kind: str, steps: int = 2) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    model = table(0, kind)
    optimizer = OPTIMIZERS[kind](model.parameters())
    with checkpointer(model, optimizer, "old", store) as c:
        for _ in range(steps):
            step(model, optimizer)
        c.save_checkpoint(steps).wait()
    return model, optimizer


def rows_of(optimizer: torch.optim.Optimizer, model: nn.ModuleDict) -> Mapping[str, Any]:
    return {k: v for k, v in optimizer.state[model["user"].weight].items() if k != "step"}


def alike(one: str, other: str) -> bool:
    return one == other or {one, other} == {"SparseAdam", "Adam"}


@pytest.mark.parametrize(("before", "after"), [(a, b) for a in OPTIMIZERS for b in OPTIMIZERS if not alike(a, b)])
def test_a_table_of_another_optimizer_is_refused_with_both_kinds_and_fields_and_nothing_changes(
    before: str, after: str, store_name: str
) -> None:
    saved(store_name, before)
    model = table(1, after)
    optimizer = OPTIMIZERS[after](model.parameters())
    weight, state = model["user"].weight.detach().clone(), dict(rows_of(optimizer, model))
    with checkpointer(model, optimizer, "new", store_name) as c, pytest.raises(MismatchError) as caught:
        c.resume_from_checkpoint()
    old, new = before.partition(" ")[0], after.partition(" ")[0]
    keeps = FIELDS[after] if after != "NAdam" else "what is not known before its first step"
    words = f"table user: {old} kept {FIELDS[before]} for each row, and {new} of the model keeps {keeps}. "
    assert words in str(caught.value)
    assert f"the model and seq 1 (step 2) in memory://{store_name} differ" in str(caught.value)
    assert torch.equal(model["user"].weight, weight)
    assert_same(rows_of(optimizer, model), state)
    step(model, optimizer)  # whoever starts afresh after all can


@pytest.mark.parametrize(("before", "after"), [(a, b) for a in OPTIMIZERS for b in OPTIMIZERS if alike(a, b)])
@pytest.mark.parametrize("steps", [0, 2])
def test_the_same_optimizer_under_another_name_takes_its_rows(
    before: str, after: str, steps: int, store_name: str
) -> None:
    model, optimizer = saved(store_name, before, steps)
    again = table(1, after)
    its_optimizer = OPTIMIZERS[after](again.parameters())
    with checkpointer(again, its_optimizer, "new", store_name) as c:
        assert c.resume_from_checkpoint() is not None
    assert_same(rows_of(its_optimizer, again), rows_of(optimizer, model))
    if before == after:
        for each, its in ((model, optimizer), (again, its_optimizer)):
            step(each, its)
        assert torch.equal(model["user"].weight, again["user"].weight)


@pytest.mark.parametrize("after", OPTIMIZERS)
@pytest.mark.parametrize("before", [None, "Adagrad", "SparseAdam"])
def test_not_strict_leaves_another_optimizer_without_foreign_state_and_able_to_step(
    before: str | None, after: str, store_name: str
) -> None:
    if before is None:
        with Checkpointer(table(0, after), MemoryStore(store_name)) as c:
            c.save_checkpoint(1).wait()
    else:
        saved(store_name, before)
    model = table(1, after)
    optimizer = OPTIMIZERS[after](model.parameters())
    if (before, after) == ("Adagrad", "RowWiseAdagrad"):
        with checkpointer(model, optimizer, "new", store_name, strict=False) as c, pytest.raises(MismatchError):
            c.resume_from_checkpoint()  # fields of one name and another width
        return
    with checkpointer(model, optimizer, "new", store_name, strict=False) as c:
        c.resume_from_checkpoint()
        held = rows_of(optimizer, model)
        assert (
            not held or ", ".join(f"{name} (float32[{held[name].shape[1]}])" for name in sorted(held)) == FIELDS[after]
        )
        step(model, optimizer)
        all_came = alike(before, after) if before is not None else after == "SGD"
        assert c.save_checkpoint(3).wait().kind == ("delta" if all_came else "base")


def test_a_table_saved_without_an_optimizer_is_refused_by_one_that_keeps_state(store_name: str) -> None:
    with Checkpointer(table(0, "SparseAdam"), MemoryStore(store_name)) as c:
        c.save_checkpoint(1).wait()
    model = table(1, "SparseAdam")
    optimizer = OPTIMIZERS["SparseAdam"](model.parameters())
    with (
        checkpointer(model, optimizer, "new", store_name) as c,
        pytest.raises(MismatchError, match=r"table user: the checkpoint has nothing .* SparseAdam of the model keeps"),
    ):
        c.resume_from_checkpoint()


def test_a_table_saved_with_an_optimizer_is_refused_by_a_model_that_has_none_for_it(store_name: str) -> None:
    saved(store_name, "Adagrad")
    with (
        Checkpointer(table(1, "Adagrad"), MemoryStore(store_name)) as c,
        pytest.raises(MismatchError, match=r"table user: Adagrad kept sum .* no optimizer of the model has it"),
    ):
        c.resume_from_checkpoint()


@pytest.mark.parametrize("kind", ["Adagrad", "SparseAdam"])
def test_not_strict_a_new_table_of_a_known_optimizer_begins_anew_and_steps(kind: str, store_name: str) -> None:
    saved(store_name, kind)
    model = table(1, kind)
    model["item"] = nn.Embedding(5, 2, sparse=True)
    optimizer = OPTIMIZERS[kind](model.parameters())
    with checkpointer(model, optimizer, "old", store_name, strict=False) as c:
        c.resume_from_checkpoint()
    model["item"](torch.tensor([1])).sum().backward()
    step(model, optimizer)
