"""Tensors that are no plain numbers in memory come back, or are refused by name before anything is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapter_oracle import assert_same
from torch import nn

from incremental_ckpt import Checkpointer
from incremental_ckpt.errors import CheckpointError, MismatchError
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


def expanded(*shape: int) -> torch.Tensor:
    return torch.rand(1, *shape[1:]).expand(*shape)


def windows(*shape: int) -> torch.Tensor:
    return torch.rand(sum(shape)).as_strided(shape, (1,) * len(shape))


def of_inference(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.rand(*shape)


def mirrored(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.complex64).conj()


def transposed(*shape: int) -> torch.Tensor:
    return torch.rand(*reversed(shape)).t()


UNUSUAL = {f.__name__: f for f in (expanded, windows, of_inference, mirrored, transposed)}
PLACES = ("buffer", "parameter", "optimizer state")


class Run:
    """A table, a frozen parameter, a buffer and an optimizer, one of them with a tensor of an unusual kind."""

    def __init__(self, place: str = "", make: Any = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"table": nn.Embedding(6, 4, sparse=True), "over": nn.Linear(4, 3)})
        self.model.register_buffer("seen", torch.rand(3, 4))
        self.optimizer = torch.optim.Adam(self.model["over"].parameters(), lr=0.1)
        self.model["over"](torch.ones(4)).sum().backward()
        self.optimizer.step()
        if place:
            self.put(place, make)

    def put(self, place: str, make: Any) -> None:
        if place == "buffer":
            self.model.seen = make(3, 4)
        elif place == "parameter":
            self.model["over"].fixed = nn.Parameter(make(3, 4), requires_grad=False)
        else:
            self.optimizer.state[self.model["over"].weight]["exp_avg"] = make(3, 4)

    def checkpointer(self, store_name: str) -> Checkpointer:
        return Checkpointer(self.model, MemoryStore(store_name), optimizer=self.optimizer)

    def copy(self) -> dict[str, Any]:
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        states = self.optimizer.state_dict()["state"].items()
        return {**state, **{f"{n}.{k}": v.clone() for n, s in states for k, v in s.items()}}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL.keys())
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("in_the_resumed_model", [True, False])
def test_a_tensor_of_any_memory_comes_back_into_its_like_or_a_plain_one(
    place: str, make: Any, in_the_resumed_model: bool, store_name: str
) -> None:
    plain = lambda *shape: make(*shape).clone().zero_()  # noqa: E731
    run = Run(place, make)
    again = Run(place, make if in_the_resumed_model else plain, seed=3)
    before = again.model.seen
    with run.checkpointer(store_name) as c:
        c.save_checkpoint(1).wait()
    with again.checkpointer(store_name) as c:
        c.resume_from_checkpoint()
    assert_same(again.copy(), run.copy())
    assert again.model.seen is before


@pytest.mark.parametrize("make", [expanded, windows])
def test_a_parameter_whose_elements_share_memory_is_refused_before_anything_is_changed(
    make: Any, store_name: str
) -> None:
    run, again = Run("parameter", torch.rand), Run("parameter", make, seed=3)
    with run.checkpointer(store_name) as c:
        c.save_checkpoint(1).wait()
    before = again.copy()
    words = r"elements of 'over.fixed' share memory in the model .*: give the model a copy \(.clone\(\)\)"
    with again.checkpointer(store_name) as c, pytest.raises(MismatchError, match=words):
        c.resume_from_checkpoint()
    assert_same(again.copy(), before)


@pytest.mark.parametrize("make", [expanded, windows])
@pytest.mark.parametrize("place", ["buffer", "optimizer state"])
def test_what_the_run_holds_apart_takes_the_place_of_what_shares_memory(place: str, make: Any, store_name: str) -> None:
    run, again = Run(place, torch.rand), Run(place, make, seed=3)
    with run.checkpointer(store_name) as c:
        c.save_checkpoint(1).wait()
    with again.checkpointer(store_name) as c:
        c.resume_from_checkpoint()
    assert_same(again.copy(), run.copy())


@pytest.mark.parametrize("make", [expanded, windows])
@pytest.mark.parametrize("late", [False, True])
def test_a_table_whose_rows_share_memory_is_refused_by_name(make: Any, late: bool, store_name: str) -> None:
    run, words = Run(), "table 'table' has elements that share memory"
    weight = nn.Parameter(make(6, 4), requires_grad=False)
    if not late:
        run.model["table"].weight = weight
        with pytest.raises(CheckpointError, match=words):
            run.checkpointer(store_name)
        return
    with run.checkpointer(store_name) as c:
        c.save_checkpoint(1).wait()
        run.model["table"].weight = weight
        before = run.copy()
        with pytest.raises(CheckpointError, match=words):
            c.resume_from_checkpoint()
        with pytest.raises(CheckpointError, match=words):
            c.save_checkpoint(2)
        assert_same(run.copy(), before)


def put_on_meta(run: Run, place: str) -> None:
    if place == "table":
        run.model["table"].weight = nn.Parameter(torch.empty(6, 4, device="meta"), requires_grad=False)
    else:
        run.put(place, lambda *shape: torch.empty(*shape, device="meta"))


@pytest.mark.parametrize(("place", "name"), [("buffer", "'seen'"), ("parameter", "'over.fixed'"), ("table", "'table'")])
def test_what_lost_its_memory_after_the_checkpointer_was_made_is_refused_before_anything_is_changed(
    place: str, name: str, store_name: str
) -> None:
    run = Run("parameter", torch.rand)
    with run.checkpointer(store_name) as c:
        c.save_checkpoint(1).wait()
        with torch.no_grad():
            run.model["over"].weight.fill_(7)
            run.model["table"].weight.fill_(7)
        put_on_meta(run, place)
        with pytest.raises(CheckpointError, match=rf"{name}.* is on the meta device"):
            c.resume_from_checkpoint()
        for weight in (run.model["over"].weight, run.model["table"].weight):
            assert weight.is_meta or bool((weight == 7).all())
