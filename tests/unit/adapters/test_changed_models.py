"""Models that change under a Checkpointer: followed where a resume of the model as built brings them back, else refused
at the next step or save, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapter_oracle import Watched, assert_same, restore, save
from torch import nn
from torch.nn.utils import parametrize
from torchrec.optim.keyed import KeyedOptimizerWrapper

from incremental_ckpt import Checkpointer, SaveError
from incremental_ckpt.adapters import adapt
from incremental_ckpt.errors import CheckpointError, MismatchError
from incremental_ckpt.storage import MemoryStore

Change = Callable[["Run"], object]


class Run:
    """A table and a dense layer under one optimizer; rows 0 to 9 are looked up."""

    def __init__(self, seed: int = 0, **of_optimizer: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"table": nn.Embedding(20, 4, sparse=True), "over": nn.Linear(4, 1)})
        self.model.register_buffer("later", None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, **of_optimizer)

    def step(self, number: int, rows: int = 10) -> None:
        self.optimizer.zero_grad()
        ids = torch.randint(0, rows, (5,), generator=torch.Generator().manual_seed(number))
        self.model["over"](self.model["table"](ids).cos()).sum().backward()
        self.optimizer.step()

    def exchange(self, parameter: torch.Tensor, name: str = "table") -> None:
        """Another parameter takes a weight's place, and its old one's in the optimizer."""
        old = self.model[name].weight
        self.model[name].weight = nn.Parameter(parameter)
        members = self.optimizer.param_groups[0]["params"]
        members[[id(p) for p in members].index(id(old))] = self.model[name].weight

    @property
    def rows(self) -> torch.Tensor:
        weight: torch.Tensor = self.model["table"].weight.detach()
        return weight

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def rebuild(run: Run) -> None:
    old = run.model["table"].weight
    run.model["table"] = nn.Embedding(20, 4, sparse=True)
    members = run.optimizer.param_groups[0]["params"]
    members[[id(p) for p in members].index(id(old))] = run.model["table"].weight


def add_later(run: Run) -> None:
    run.model.later = torch.arange(3.0)


FOLLOWED: dict[str, Change] = {
    "another parameter": lambda run: run.exchange(run.rows * 2),
    "another dense parameter": lambda run: run.exchange(torch.ones(1, 4), "over"),
    "other memory": lambda run: setattr(run.model["table"].weight, "data", run.rows * 2),
    "another dtype and back": lambda run: run.model.to(torch.bfloat16).to(torch.float32),
    "a loaded state": lambda run: run.model.load_state_dict(Run(seed=5).model.state_dict()),
    "an assigned state": lambda run: run.exchange(Run(seed=5).rows),
    "a module built anew": rebuild,
    "a buffer that had no value": add_later,
}


@pytest.mark.parametrize("trained_after", [False, True])
@pytest.mark.parametrize("change", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_what_has_taken_a_place_of_the_same_name_and_shape_is_in_the_next_delta(
    change: Change, trained_after: bool, store_name: str
) -> None:
    run = Run()
    states = []
    with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer, kind="consecutive") as c:
        for number in range(4):
            if number == 2:
                change(run)
            if number != 2 or trained_after:
                run.step(number)
            info = c.save_checkpoint(number).wait()
            states.append(run.copy())
    assert info.kind == "delta"
    for number, state in enumerate(states):
        again = Run(seed=9)
        with Checkpointer(again.model, MemoryStore(store_name), optimizer=again.optimizer) as c:
            assert c.resume_from_checkpoint(number) is not None
        assert_same(again.copy(), state)


def longer(run: Run) -> None:
    run.exchange(torch.cat([run.rows, torch.ones(5, 4)]))


def shorter(run: Run) -> None:
    run.model["table"].weight.data = run.rows[:10].clone()


def wider(run: Run) -> None:
    run.exchange(torch.ones(20, 6))
    run.exchange(torch.ones(1, 6), "over")


@pytest.mark.parametrize(("change", "now"), [(longer, "25 x 4"), (shorter, "10 x 4"), (wider, "20 x 6")])
@pytest.mark.parametrize("at_the_step", [True, False])
def test_a_table_of_another_shape_is_refused_by_name_at_the_step_and_at_every_save(
    change: Change, now: str, at_the_step: bool, store_name: str
) -> None:
    run = Run()
    words = f"table 'table' is {now} now and was 20 x 4 when the Checkpointer was made"
    with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer) as c:
        run.step(1)
        c.save_checkpoint(1).wait()
        change(run)
        if at_the_step:
            before = run.copy()
            with pytest.raises(CheckpointError, match=words):
                run.step(2)
            assert_same(run.copy(), before)
        for number in (2, 3):
            with pytest.raises(SaveError, match=words):
                c.save_checkpoint(number)
    with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer) as c:  # as the error says
        run.step(4)
        assert c.save_checkpoint(4).wait().kind == "base"


REFUSED: dict[str, tuple[Change, str]] = {
    "a new layer": (
        lambda run: run.model.update({"head": nn.Linear(2, 2)}), "'head.bias', 'head.weight' were added. A resume"
    ),
    "a new buffer": (lambda run: run.model.register_buffer("seen", torch.zeros(1)), "'seen' were added"),
    "a layer less": (lambda run: run.model.pop("over"), "'over.bias', 'over.weight' were removed"),
    "a longer layer": (lambda run: run.exchange(torch.ones(3, 4), "over"), "'over.weight' have another shape"),
    "a new table": (lambda run: run.model.update({"more": nn.Embedding(2, 2)}), "'more' were added"),
    "a table less": (lambda run: run.model.pop("table"), "'table' were removed"),
    "a module with another table": (
        lambda run: run.model.update({"table": nn.Embedding(21, 4)}), "'table' have another shape or optimizer"
    ),
    "a module whose table has no optimizer": (
        lambda run: run.model.update({"table": nn.Embedding(20, 4)}), "'table' have another shape or optimizer"
    ),
    "a layer of another dtype": (
        lambda run: run.model["over"].half(), "'over.bias', 'over.weight' have another dtype. A resume"
    ),
    "a model of another dtype": (
        lambda run: run.model.bfloat16(), "'over.bias', 'over.weight', 'table' have another dtype"
    ),
    "a table of another dtype": (lambda run: run.exchange(run.rows.double()), "'table' have another dtype"),
    "a module whose table has another dtype": (
        lambda run: (rebuild(run), run.exchange(run.rows.half())), "'table' have another dtype"
    ),
    "a parametrized table": (
        lambda run: parametrize.register_parametrization(run.model["table"], "weight", nn.Identity()), "'table' were"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_model_that_a_resume_of_the_model_as_built_would_refuse_cannot_be_saved(
    change: Change, words: str, store_name: str
) -> None:
    run = Run()
    with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer) as c:
        c.save_checkpoint(1).wait()
        change(run)
        for number in (2, 3):
            with pytest.raises(SaveError, match=words):
                c.save_checkpoint(number)
    with Checkpointer(run.model, MemoryStore(store_name)) as c:  # as the error says
        assert c.save_checkpoint(4).wait().kind == "base"


def test_a_parametrized_table_stops_training_by_name_and_not_in_the_middle_of_a_step() -> None:
    run = Run()
    Watched(run.model, run.optimizer)
    run.step(1)
    parametrize.register_parametrization(run.model["table"], "weight", nn.Identity())
    with pytest.raises(CheckpointError, match=r"table 'table' has no parameter 'weight' any more"):
        run.step(2)


def test_an_error_about_other_shards_is_raised_again_and_forgets_nothing() -> None:
    run = Run()
    watched = Watched(run.model, run.optimizer)
    table = run.model["table"]
    run.model["table"] = nn.Embedding(3, 4)
    for _ in range(2):
        with pytest.raises(MismatchError, match="'table' have another shape"):
            watched.adapter.tables()
    run.model["table"] = table
    run.step(1)
    assert watched.changed() == watched.marked != {}


def test_a_group_of_parameters_that_was_added_is_named_at_the_resume(store_name: str) -> None:
    run = Run()
    more = nn.Parameter(torch.zeros(2))
    with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer) as c:
        run.optimizer.add_param_group({"params": [more]})
        c.save_checkpoint(1).wait()
    again = Run()
    with (
        Checkpointer(again.model, MemoryStore(store_name), optimizer=again.optimizer) as c,
        pytest.raises(MismatchError, match="optimizer '0' has 1 parameter groups, 2 in the checkpoint: make the same"),
    ):
        c.resume_from_checkpoint()


def test_names_of_optimizer_state_are_those_of_the_parameters_that_are_there_now() -> None:
    run = Run(momentum=0.9)
    run.model["table"].sparse = False
    adapter = adapt(run.model, run.optimizer)
    run.step(1)
    run.exchange(torch.ones(1, 4), "over")
    run.step(2)
    assert set(adapter.state()["optimizer"]["0"]["state"]) == {"table.weight", "over.weight", "over.bias"}


class _Seen(nn.Module):
    """A layer that makes a buffer in its first forward."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.ones(2))
        return rows


def with_lazy_buffer() -> Run:
    run = Run()
    run.model["seen"] = _Seen()
    return run


@pytest.mark.parametrize("first_life_warms_up_before", [True, False])
def test_what_a_warm_up_before_the_resume_makes_belongs_to_the_model(
    first_life_warms_up_before: bool, store_name: str
) -> None:
    for life in (1, 2, 3):
        run = with_lazy_buffer()
        if first_life_warms_up_before and life == 1:
            run.model["seen"](run.rows)
        with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer) as checkpointer:
            run.model["seen"](run.rows)
            progress = checkpointer.resume_from_checkpoint()
            assert (progress.step if progress else 0) == life - 1
            run.step(life)
            checkpointer.save_checkpoint(life).wait()


def test_what_appears_after_the_resume_is_refused_unless_resumes_are_not_strict(store_name: str) -> None:
    run = with_lazy_buffer()
    with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer) as checkpointer:
        checkpointer.resume_from_checkpoint()
        run.model["seen"](run.rows)
        with pytest.raises(SaveError, match=r"'seen.seen' were added"):
            checkpointer.save_checkpoint(1)
    run = with_lazy_buffer()
    with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer, strict=False) as checkpointer:
        run.model["seen"](run.rows)
        checkpointer.save_checkpoint(1).wait()


def grow(run: Run) -> None:
    run.model.later = torch.cat([run.model.later, torch.arange(3.0)])


def widen(run: Run) -> None:
    run.model.later = run.model.later.double() / 3


def shrink_to_a_number(run: Run) -> None:
    run.model.later = run.model.later.sum().int()


REPLACED: dict[str, tuple[Change, str]] = {
    "a longer buffer": (grow, r"is \(2,\) torch.float32 in the model and was \(5,\) torch.float32"),
    "a buffer of another dtype": (widen, r"is \(2,\) torch.float32 in the model and was \(2,\) torch.float64"),
    "a buffer of another shape and dtype": (shrink_to_a_number, r"was \(\) torch.int32 in the run that is resumed"),
}


@pytest.mark.parametrize(("change", "words"), REPLACED.values(), ids=REPLACED.keys())
@pytest.mark.parametrize("changed_before_the_resume", [False, True])
def test_a_buffer_that_the_run_has_replaced_takes_the_place_of_the_model_s_own(
    change: Change, words: str, changed_before_the_resume: bool, store_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def built() -> Run:
        run = Run()
        run.model.later = torch.ones(2)
        run.model["also"] = nn.Identity()
        run.model["also"].register_buffer("tied", run.model.later)
        return run

    def changed(run: Run) -> Run:
        change(run)
        run.model["also"].tied = run.model.later
        return run

    run, again = built(), built()
    with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer, kind="consecutive") as c:
        c.save_checkpoint(1).wait()
        run.step(1)
        changed(run)
        assert c.save_checkpoint(2).wait().kind == "delta"
    if changed_before_the_resume:
        changed(again).model.later.zero_()
    with Checkpointer(again.model, MemoryStore(store_name), optimizer=again.optimizer, kind="consecutive") as c:
        c.resume_from_checkpoint()
        assert_same(again.copy(), run.copy())
        assert again.model["also"].tied is again.model.later
        assert again.model.later.dtype == run.model.later.dtype
        run.step(3)
        again.step(3)
        assert c.save_checkpoint(3).wait().kind == "delta"
    assert_same(again.copy(), run.copy())
    if not changed_before_the_resume:
        assert [r for r in caplog.records if "takes its place" in r.getMessage()]
        assert caplog.text.count("buffer 'later'") == 1
        assert re.search(words, caplog.text)


def assign(module: nn.Module) -> None:
    module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()}, assign=True)


def exchange(module: Any) -> None:
    module.weight = nn.Parameter(module.weight.detach() * 2)


ORPHANED: dict[str, tuple[Change, str]] = {
    "an assigned state": (lambda run: assign(run.model), "'over.bias', 'over.weight', 'table.weight' of the model"),
    "an assigned state of a layer": (lambda run: assign(run.model["over"]), "'over.bias', 'over.weight' of the model"),
    "an assigned state of a table": (lambda run: assign(run.model["table"]), "'table.weight' of the model"),
    "another parameter": (lambda run: exchange(run.model["over"]), "'over.weight' of the model"),
    "another table": (lambda run: exchange(run.model["table"]), "'table.weight' of the model"),
    "another layer": (lambda run: run.model.update({"over": nn.Linear(4, 1)}), "'over.bias', 'over.weight' of"),
}


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize(("change", "words"), ORPHANED.values(), ids=ORPHANED.keys())
def test_parameters_that_the_optimizer_no_longer_trains_are_refused_by_name_until_it_is_given_them(
    change: Change, words: str, keyed: bool, store_name: str
) -> None:
    run, again = Run(), Run(seed=9)
    for each in (run, again) if keyed else ():
        each.optimizer = KeyedOptimizerWrapper(
            dict(each.model.named_parameters()), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        )
    with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer) as c:
        run.step(1)
        c.save_checkpoint(1).wait()
        change(run)
        for number in (2, 3):
            with pytest.raises(SaveError, match=rf"^(.*: )?{words}.* are not what the optimizer trains any more"):
                c.save_checkpoint(number)
        run.optimizer.param_groups[0]["params"][:] = run.model.parameters()
        run.step(4)
        c.save_checkpoint(4).wait()
    with Checkpointer(again.model, MemoryStore(store_name), optimizer=again.optimizer) as c:
        assert c.resume_from_checkpoint() is not None
    assert_same(again.copy(), run.copy())


def swap(run: Run) -> None:
    run.optimizer.zero_grad()
    torch.utils.swap_tensors(run.model["table"].weight, nn.Parameter(run.rows * 2))


def roll_back(run: Run) -> None:
    adapter = adapt(run.model, run.optimizer)
    restore(adapter, save(adapter))


@pytest.mark.parametrize(
    "change", [swap, roll_back, lambda run: run.model.to(torch.float64).to("cpu", torch.float32)],
    ids=["tensors swapped", "a restore", "moved and converted"],
)  # fmt: skip
def test_parameters_that_keep_their_identity_are_still_what_the_optimizer_trains(change: Change) -> None:
    run = Run()
    adapter = adapt(run.model, run.optimizer)
    run.step(1)
    change(run)
    saved = adapter.state()["optimizer"]["0"]
    assert saved["param_groups"][0]["params"] == ["table.weight", "over.weight", "over.bias"]


def test_a_state_assigned_before_the_checkpointer_is_made_can_be_saved_and_resumed(store_name: str) -> None:
    copies = []
    for resumed in (False, True):
        run = Run()
        assign(run.model)
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer) as c:
            assert (c.resume_from_checkpoint() is not None) == resumed
            if not resumed:
                run.step(1)
                c.save_checkpoint(1).wait()
        copies.append(run.copy())
    assert_same(*copies)


def test_an_optimizer_that_drops_a_frozen_parameter_trains_no_other_in_its_place(store_name: str) -> None:
    """The run that is resumed can drop it too."""
    for step in (1, 2):
        run = Run()
        with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer) as c:
            run.optimizer.param_groups[0]["params"].pop()
            assert (c.resume_from_checkpoint() is not None) == (step > 1)
            c.save_checkpoint(step).wait()


def test_exchanged_parameters_are_saved_where_a_resume_need_not_find_the_same() -> None:
    run = Run()
    adapter = adapt(run.model, run.optimizer, strict=False)
    assign(run.model)
    assert adapter.state()["dense"]["over.weight"].data_ptr() == run.model["over"].weight.data_ptr()


def test_a_run_can_go_back_to_before_a_buffer_had_its_value(store_name: str) -> None:
    run, again = Run(), Run(seed=9)
    with Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer) as c:
        c.save_checkpoint(0).wait()
        add_later(run)
        c.save_checkpoint(1).wait()
        assert c.resume_from_checkpoint(0) is not None
        assert run.model.later is None
        add_later(run)
        c.save_checkpoint(2).wait()
    with Checkpointer(again.model, MemoryStore(store_name), optimizer=again.optimizer) as c:
        for step, later in ((2, [0.0, 1.0, 2.0]), (0, None), (1, [0.0, 1.0, 2.0])):
            assert c.resume_from_checkpoint(step) is not None
            assert (again.model.later if later is None else again.model.later.tolist()) == later
        again.model.later = None
        c.save_checkpoint(3).wait()  # a model as it is built has none either
    with (
        Checkpointer(run.model, MemoryStore(store_name), optimizer=run.optimizer) as c,
        pytest.raises(MismatchError, match="'later' of"),
    ):
        c.resume_from_checkpoint()  # to this Checkpointer it is one that always had a value
    built = Run(seed=8)
    with Checkpointer(built.model, MemoryStore(store_name), optimizer=built.optimizer) as c:
        assert c.resume_from_checkpoint() is not None
    assert built.model.later is None
