"""Plain embedding modules under torch optimizers: what is tracked by rows, what is saved whole, what comes back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapter_oracle import Watched, assert_same, restore, save
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from incremental_ckpt.adapters import adapt
from incremental_ckpt.errors import CheckpointError, SaveError

Make = Callable[[Any], torch.optim.Optimizer]

ROW_LOCAL: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "sparse-adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
}
WHOLE: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "weight-decay": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.01),
}


class Tables(nn.Module):
    def __init__(self, sparse: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.user = nn.Embedding(30, 4, sparse=sparse)
        self.item = nn.EmbeddingBag(20, 6, sparse=sparse, mode="sum")
        self.empty = nn.Embedding(0, 4, sparse=sparse)

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        users = torch.randint(0, 12, (5,), generator=generator)
        items = torch.randint(0, 9, (7,), generator=generator)
        return self.user(users).cos().sum() + self.item(items, torch.tensor([0, 3, 3, 5])).cos().sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(seed).backward()
    optimizer.step()


def assert_no_change_is_missed(watched: Watched) -> None:
    changed = watched.changed()
    assert changed
    for table, rows in changed.items():
        assert table in watched.whole or rows <= watched.marked.get(table, set()), table


@pytest.mark.parametrize("make", ROW_LOCAL.values(), ids=ROW_LOCAL.keys())
def test_sparse_gradients_mark_exactly_the_changed_rows(make: Make) -> None:
    model = Tables()
    optimizer = make(model.parameters())
    watched = Watched(model, optimizer)
    assert [t.tracked for t in watched.adapter.tables()] == [True, True, True]
    for seed in range(3):
        step(model, optimizer, seed)
        assert watched.changed() == watched.marked != {}
        watched.begin()
    assert not watched.whole


def test_accumulated_and_uncoalesced_gradients_are_marked() -> None:
    model = Tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched(model, optimizer)
    model(1).backward()
    model(2).backward()
    assert watched.marked == {}
    optimizer.step()
    assert watched.changed() == watched.marked != {}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE.keys())
def test_optimizers_that_change_rows_nobody_looked_up_are_not_tracked(make: Make, sparse: bool) -> None:
    model = Tables(sparse)
    assert [t.tracked for t in adapt(model, make(model.parameters())).tables()] == [False, False, False]


@pytest.mark.parametrize("make", [*ROW_LOCAL.values()][:3], ids=[*ROW_LOCAL][:3])
def test_dense_gradients_are_not_tracked(make: Make) -> None:
    model = Tables(sparse=False)
    assert not any(t.tracked for t in adapt(model, make(model.parameters())).tables())


def test_a_subclass_of_a_known_optimizer_may_do_anything_and_is_not_tracked() -> None:
    class Mine(torch.optim.SGD):
        pass

    model = Tables()
    assert not any(t.tracked for t in adapt(model, Mine(model.parameters(), lr=0.1)).tables())


def test_tables_whose_optimizer_was_not_given_are_not_tracked() -> None:
    assert not any(t.tracked for t in adapt(Tables()).tables())


@pytest.mark.parametrize("frozen", [False, True])
def test_max_norm_changes_rows_in_forward_and_is_not_tracked(frozen: bool) -> None:
    model = nn.ModuleDict({"a": nn.Embedding(5, 2, sparse=True, max_norm=1.0)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(not frozen)
    assert [t.tracked for t in adapt(model, optimizer).tables()] == [False]


def test_a_frozen_table_is_tracked_and_never_marked() -> None:
    model = Tables()
    model.item.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched(model, optimizer)
    step(model, optimizer, 1)
    assert watched.adapter.tables()[1].tracked
    assert set(watched.marked) == {0}
    assert watched.changed() == watched.marked


def test_a_table_that_thaws_is_marked_whole() -> None:
    model = Tables()
    model.item.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.user.parameters(), lr=0.1)
    watched = Watched(model, optimizer)
    model.item.weight.requires_grad_(True)
    optimizer.add_param_group({"params": [model.item.weight]})
    step(model, optimizer, 1)
    watched.adapter.tables()
    assert watched.whole == {1}


def test_momentum_that_is_switched_on_later_marks_the_whole_table() -> None:
    model = Tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched(model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    step(model, optimizer, 1)
    assert watched.whole == {0, 1}


def test_a_closure_announces_all_rows_since_its_gradients_come_too_late() -> None:
    model = Tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched(model, optimizer)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(3)
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    assert not watched.whole
    assert [len(watched.marked.get(i, ())) for i in range(3)] == [t.shard.rows for t in watched.adapter.tables()]


def test_edits_outside_the_optimizer_mark_the_whole_table() -> None:
    model = Tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched(model, optimizer)
    with torch.no_grad():
        model.user.weight[3] = 0.0
    watched.adapter.tables()
    assert watched.whole == {0}
    watched.begin()
    with torch.no_grad():
        model.item.weight[3] = 0.0
    step(model, optimizer, 1)  # the edit is seen although a step follows it
    assert watched.whole == {1}
    watched.begin()
    step(model, optimizer, 2)
    watched.adapter.tables()
    assert watched.whole == set()


@pytest.mark.parametrize("assign", [False, True])
def test_a_load_state_dict_marks_the_whole_tables(assign: bool) -> None:
    model = Tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched(model, optimizer)
    model.load_state_dict(Tables(seed=5).state_dict(), assign=assign)
    watched.adapter.tables()
    assert watched.whole == {0, 1, 2}
    optimizer.param_groups[0]["params"][:] = model.parameters()
    assert watched.adapter.state()["dense"] == {}


def test_a_frozen_table_that_is_replaced_twice_between_two_looks_is_marked() -> None:
    """The second one may get the identity of what stood there at first."""
    model = Tables()
    model.requires_grad_(False)
    watched = Watched(model, None)
    for seed in range(5, 25):
        watched.begin()
        model.load_state_dict(Tables(seed=seed + 100).state_dict(), assign=True)
        model.load_state_dict(Tables(seed=seed).state_dict(), assign=True)
        watched.adapter.tables()
        assert watched.whole >= {0, 1}  # one without rows has no memory to tell it by, and nothing to lose


@pytest.mark.parametrize("copied", ["torch.save", "deepcopy"])
def test_a_watched_model_can_be_saved_and_copied_whole(copied: str) -> None:
    model = Tables()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    watched = Watched(model, optimizer)
    step(model, optimizer, 0)
    if copied == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    watched.begin()
    other.load_state_dict(Tables(seed=5).state_dict())
    step(other, torch.optim.SGD(other.parameters(), lr=0.1), 1)
    watched.adapter.tables()
    assert (watched.marked, watched.whole) == ({}, set()), "what happens to the copy is nobody's change"


def test_what_is_written_through_the_tables_is_no_edit_and_changes_the_model() -> None:
    model = Tables()
    watched = Watched(model, torch.optim.SGD(model.parameters(), lr=0.1))
    watched.adapter.tables()[0].tensors["weight"].zero_()
    watched.adapter.tables()
    assert watched.whole == set()
    assert not model.user.weight.any()


def test_per_row_state_of_the_optimizer_moves_to_the_table() -> None:
    model = Tables()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    adapter = adapt(model, optimizer)
    assert [f.name for f in adapter.tables()[0].shard.fields] == ["weight"]
    step(model, optimizer, 1)
    assert [f.name for f in adapter.tables()[0].shard.fields] == ["weight", "exp_avg", "exp_avg_sq"]
    assert [f.name for f in adapter.tables()[2].shard.fields] == ["weight"]
    saved = adapter.state()["optimizer"]["0"]
    assert saved["state"] == {"user.weight": {"step": 1}, "item.weight": {"step": 1}}
    assert saved["rows"] == {"user.weight": ["exp_avg", "exp_avg_sq"], "item.weight": ["exp_avg", "exp_avg_sq"]}
    assert adapter.state()["dense"] == {}


@pytest.mark.parametrize("make", [*ROW_LOCAL.values(), *WHOLE.values()], ids=[*ROW_LOCAL, *WHOLE])
def test_a_freshly_built_model_goes_on_bit_for_bit(make: Make) -> None:
    sparse = make in ROW_LOCAL.values()
    one, other = Tables(sparse, seed=1), Tables(sparse, seed=2)
    first, second = make(one.parameters()), make(other.parameters())
    source, target = adapt(one, first), adapt(other, second)
    for seed in range(3):
        step(one, first, seed)
    first.param_groups[0]["lr"] = 0.025
    restore(target, save(source))
    assert_same(save(source), save(target))
    for seed in range(3, 6):
        step(one, first, seed)
        step(other, second, seed)
    assert_same(save(source), save(target))


def test_a_restore_keeps_the_prepared_tensors() -> None:
    model = Tables()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    step(model, optimizer, 1)
    saved = save(adapt(model, optimizer))
    fresh = Tables(seed=3)
    other = torch.optim.SparseAdam(list(fresh.parameters()), lr=0.1)
    adapter = adapt(fresh, other)
    prepared = adapter.prepare_restore(saved[0], saved[2])[0].tensors["exp_avg"]
    restore(adapter, saved)
    assert other.state[fresh.user.weight]["exp_avg"].data_ptr() == prepared.data_ptr()


def test_going_back_to_before_the_first_step_forgets_lazily_created_state() -> None:
    model = Tables()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    adapter = adapt(model, optimizer)
    saved = save(adapter)
    step(model, optimizer, 1)
    restore(adapter, saved)
    assert not optimizer.state
    step(model, optimizer, 1)


def test_restored_rows_are_not_taken_for_changes() -> None:
    source, model = Tables(seed=1), Tables(seed=2)
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (source, model)]
    saved = save(adapt(source, optimizers[0]))
    watched = Watched(model, optimizers[1])
    restore(watched.adapter, saved)
    watched.adapter.tables()
    assert watched.whole == set()
    assert watched.marked == {}


def test_tied_tables_are_one_table() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(9, 2, sparse=True), "b": nn.Embedding(9, 2, sparse=True)})
    model["b"].weight = model["a"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched(model, optimizer)
    assert [t.shard.table for t in watched.adapter.tables()] == ["a"]
    assert watched.adapter.tables()[0].tracked
    (model["a"](torch.tensor([1])) + model["b"](torch.tensor([2]))).cos().sum().backward()
    optimizer.step()
    assert watched.marked == {0: {1, 2}} == watched.changed()


def test_one_module_under_two_names_is_one_table() -> None:
    shared = nn.Embedding(9, 2, sparse=True)
    model = nn.ModuleDict({"a": shared, "b": shared})
    (table,) = adapt(model, torch.optim.SGD(model.parameters(), lr=0.1)).tables()
    assert (table.shard.table, table.tracked) == ("a", True)


def test_a_table_tied_to_a_dense_layer_is_saved_whole() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(9, 2, sparse=True), "head": nn.Linear(2, 9, bias=False)})
    model["head"].weight = model["emb"].weight
    adapter = adapt(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [(t.shard.table, t.tracked) for t in adapter.tables()] == [("emb", False)]
    assert adapter.state()["dense"] == {}


def test_optimizers_that_step_inside_backward_mark_and_guard() -> None:
    model = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True, mode="sum"), nn.Linear(4, 1))
    _apply_optimizer_in_backward(torch.optim.Adagrad, model[0].parameters(), {"lr": 0.1})
    dense = torch.optim.SGD(model[1].parameters(), lr=0.1)
    watched = Watched(model, dense)
    assert watched.adapter.tables()[0].tracked
    model(torch.tensor([[1, 2], [2, 5]])).cos().sum().backward()
    assert watched.changed() == watched.marked == {0: {1, 2, 5}}
    with pytest.raises(SaveError):
        watched.adapter.state()
    dense.step()
    assert "in_backward.0.weight" in watched.adapter.state()["optimizer"]


def test_half_precision_and_odd_dims_keep_their_dtype() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(9, 3, dtype=torch.bfloat16)})
    (table,) = adapt(model).tables()
    assert [(f.name, f.dtype, f.width) for f in table.shard.fields] == [("weight", "bfloat16", 3)]


def test_a_root_that_is_itself_a_table_has_a_name() -> None:
    assert [t.shard.table for t in adapt(nn.Embedding(4, 2)).tables()] == ["weight"]


def test_two_optimizers_that_keep_state_for_the_rows_of_one_table_are_refused_by_name() -> None:
    model = Tables()
    optimizers = {
        "fast": torch.optim.Adagrad(model.parameters(), lr=0.1),
        "slow": torch.optim.SparseAdam([model.user.weight], lr=0.1),
    }
    with pytest.raises(CheckpointError, match=r"'fast' and 'slow'.*'user'"):
        adapt(model, optimizers)


def test_beside_an_optimizer_without_state_the_other_ones_state_comes_back() -> None:
    def optimizers(model: Tables) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adagrad([model.user.weight], lr=0.1)]

    model = Tables()
    both = optimizers(model)
    for each in both:
        step(model, each, 1)
    saved = save(adapt(model, both))
    again = Tables(seed=5)
    fresh = optimizers(again)
    restore(adapt(again, fresh), saved)
    assert_same(save(adapt(again, fresh)), saved)
    assert float(fresh[1].state[again.user.weight]["sum"].sum()) > 0


@pytest.mark.parametrize("registered_first", [True, False])
def test_rows_that_a_hook_after_the_step_edits_are_noticed(registered_first: bool) -> None:
    model = Tables()
    optimizer = ROW_LOCAL["adagrad"](model.parameters())

    def clamp(*_: object) -> None:
        with torch.no_grad():
            model.user.weight.mul_(0.5)

    if registered_first:
        optimizer.register_step_post_hook(clamp)
    watched = Watched(model, optimizer)
    if not registered_first:
        optimizer.register_step_post_hook(clamp)
    step(model, optimizer, 1)
    assert_no_change_is_missed(watched)


@pytest.mark.parametrize("registered_first", [True, False])
def test_rows_of_a_gradient_that_another_hook_exchanges_are_marked(registered_first: bool) -> None:
    model = Tables()
    optimizer = ROW_LOCAL["adagrad"](model.parameters())

    def exchange(*_: object) -> None:
        model.user.weight.grad = torch.sparse_coo_tensor([[28, 29]], torch.ones(2, 4), (30, 4))

    if registered_first:
        optimizer.register_step_pre_hook(exchange)
    watched = Watched(model, optimizer)
    if not registered_first:
        optimizer.register_step_pre_hook(exchange)
    step(model, optimizer, 1)
    assert_no_change_is_missed(watched)


def test_a_table_that_another_optimizer_takes_over_is_refused_by_name_and_training_goes_on() -> None:
    model = Tables()
    first = torch.optim.Adagrad([model.user.weight, model.item.weight], lr=0.1)
    second = torch.optim.SparseAdam([model.empty.weight], lr=0.1)
    watched = Watched(model, [first, second])
    first.param_groups[0]["params"].remove(model.user.weight)
    step(model, first, 1)
    second.add_param_group({"params": [model.user.weight]})
    with pytest.raises(CheckpointError, match="'user' has other optimizers"):
        watched.adapter.tables()


def test_a_state_with_the_name_of_the_rows_is_refused() -> None:
    model = Tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.user.weight]["weight"] = torch.zeros(30, 4)
    with pytest.raises(CheckpointError, match="named 'weight'"):
        adapt(model, optimizer).tables()


def test_parameters_without_an_optimizer_and_optimizers_of_another_model_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Tables()
    adapt(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert caplog.text == ""
    adapt(model, torch.optim.SGD(Tables().parameters(), lr=0.1))
    assert "no optimizer was given for 3 trainable parameters of the model (user.weight, " in caplog.text
    assert "trains no parameter of this model" in caplog.text
