"""Dense parameters, buffers, extra state and optimizers: names, exactness, and errors that say what differs."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from adapter_oracle import assert_same, restore, save, texts
from torch import nn
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from incremental_ckpt.adapters import adapt
from incremental_ckpt.errors import SaveError


class Counting(nn.Linear):
    """A layer with extra state and with buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.calls = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += len(x)
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Counting(), nn.BatchNorm1d(2), nn.Linear(2, 1))


def step(module: nn.Module, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    module(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).cos().sum().backward()
    optimizer.step()


def keyed(module: nn.Module, make: Any) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(module.named_parameters()), make)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True),
    "tensor-lr": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1)),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1, centered=True, momentum=0.1),
    "groups": lambda m: torch.optim.Adam([{"params": m[0].parameters(), "lr": 0.1}, {"params": m[2].parameters()}]),
    "keyed": lambda m: keyed(m, adam),
    "combined": lambda m: CombinedOptimizer([("a", keyed(m[0], adam)), ("b", keyed(m[2], torch.optim.SGD))]),
    "clipped": lambda m: GradientClippingOptimizer(keyed(m, adam), GradientClipping.NORM, max_gradient=0.5),
    "warmup": lambda m: WarmupOptimizer(
        keyed(m, adam), [WarmupStage(WarmupPolicy.LINEAR, max_iters=5, value=0.1)], lr=0.1
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_freshly_built_model_goes_on_bit_for_bit(make: Any) -> None:
    one, other = model(1), model(2)
    first, second = make(one), make(other)
    source, target = adapt(one, first), adapt(other, second)
    for seed in range(3):
        step(one, first, seed)
    for group in first.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] *= 0.5
    restore(target, save(source))
    assert_same(save(source), save(target))
    for seed in range(3, 6):
        step(one, first, seed)
        step(other, second, seed)
    assert_same(save(source), save(target))
    assert other[0].calls == 6


def test_parameters_keep_their_identity_and_memory() -> None:
    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    adapter = adapt(module, optimizer)
    step(module, optimizer, 1)
    before = [(id(p), p.data_ptr(), optimizer.state[p]["exp_avg"].data_ptr()) for p in module.parameters()]
    restore(adapter, save(adapter))
    assert before == [(id(p), p.data_ptr(), optimizer.state[p]["exp_avg"].data_ptr()) for p in module.parameters()]


def test_names_are_those_of_the_unwrapped_module() -> None:
    module = model()
    inner = dict(adapt(module).state()["dense"])
    wrapped = dict(adapt(nn.ModuleDict({"net": nn.DataParallel(module)})).state()["dense"])
    assert list(wrapped) == [f"net.{name}" for name in inner]
    assert "0._extra_state" in inner
    assert "0.seen" in inner
    assert "0.scratch" not in inner


def test_tied_parameters_are_one_tensor_under_both_names() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["b"].weight = module["a"].weight
    dense = adapt(module).state()["dense"]
    assert dense["a.weight"] is dense["b.weight"]


def test_optimizer_state_is_named_by_parameter() -> None:
    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    step(module, optimizer, 1)
    saved = adapt(module, {"dense": optimizer}).state()["optimizer"]["dense"]
    assert set(saved["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}
    assert saved["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert saved["param_groups"][0]["betas"] == (0.9, 0.999)


def test_several_optimizers_have_names() -> None:
    module = model()
    a, b = torch.optim.SGD(module[0].parameters(), lr=0.1), torch.optim.SGD(module[2].parameters(), lr=0.1)
    assert list(adapt(module, [a, b]).state()["optimizer"]) == ["0", "1"]
    assert list(adapt(module, {"x": a, "y": b}).state()["optimizer"]) == ["x", "y"]


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="not a torch optimizer"):
        adapt(model(), optimizer="adam")


def test_parameters_outside_the_model_are_named_by_their_place() -> None:
    module, outside = model(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*module.parameters(), outside], lr=0.1)
    saved = adapt(module, optimizer).state()["optimizer"]["0"]
    assert saved["param_groups"][0]["params"][-1] == "param_groups[0].params[6]"


def test_differences_are_all_named_and_change_nothing() -> None:
    module, other = model(1), model(2)
    saved = deepcopy(dict(adapt(module, torch.optim.Adam(module.parameters())).state()))
    saved["dense"]["gone.weight"] = saved["dense"].pop("2.weight")
    saved["dense"]["0.weight"] = torch.zeros(2, 4)
    saved["dense"]["0.bias"] = torch.zeros(2, dtype=torch.float64)
    target = adapt(other, torch.optim.Adam(other.parameters()))
    before = save(target)
    message = "\n".join(texts(target, saved))
    assert "'2.weight' of the model is not in the checkpoint" in message
    assert "'gone.weight' of the checkpoint is not in the model" in message
    assert "'0.weight' is (2, 3) torch.float32 in the model, (2, 4) torch.float32 in the checkpoint" in message
    assert "'0.bias' is (2,) torch.float32 in the model, (2,) torch.float64 in the checkpoint" in message
    assert_same(before, save(target))


def test_another_optimizer_is_a_difference() -> None:
    module = model()
    groups = torch.optim.Adam([{"params": module[0].parameters()}, {"params": module[2].parameters()}])
    saved = adapt(module, groups).state()
    (text,) = texts(adapt(module, torch.optim.Adam(module.parameters())), saved, fatal=True)
    assert "has 1 parameter groups, 2 in the checkpoint" in text
    assert texts(adapt(module), saved) == ["optimizer '0' of the checkpoint was not given"]
    others = texts(adapt(module, {"other": groups}), saved)
    assert [text for text in others if "optimizer 'other' is not in the checkpoint" in text and "same order" in text]


class Renamed(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(Renamed, torch.optim.AdamW), (torch.optim.AdamW, Renamed)])
def test_a_class_of_another_name_with_the_same_options_is_refused_unless_not_strict(
    saved_by: Any, loaded_by: Any
) -> None:
    one, other = model(1), model(2)
    first, second = saved_by(one.parameters(), lr=0.1), loaded_by(other.parameters(), lr=0.2)
    step(one, first, 1)
    target, saved = adapt(other, second), deepcopy(dict(adapt(one, first).state()))
    assert texts(target, saved, fatal=True) == []
    (text,) = texts(target, saved)
    assert f"optimizer '0' is {loaded_by.__name__}, in the checkpoint {saved_by.__name__}, which has the same" in text
    target.load_state(saved)
    step(one, first, 2)
    step(other, second, 2)
    assert_same(one.state_dict(), other.state_dict())
    (refused,) = texts(adapt(other, torch.optim.RMSprop(other.parameters())), saved, fatal=True)
    assert f"is RMSprop, in the checkpoint {saved_by.__name__} (those of a list" in refused


def test_not_strict_loads_what_both_have() -> None:
    module, other = model(1), model(2)
    saved = deepcopy(dict(adapt(module).state()))
    del saved["dense"]["2.weight"]
    kept = other[2].weight.clone()
    adapter = adapt(other)
    assert texts(adapter, saved, fatal=True) == []
    assert texts(adapter, saved) == ["'2.weight' of the model is not in the checkpoint"]
    adapter.load_state(saved)
    assert torch.equal(other[2].weight, kept)
    assert torch.equal(other[0].weight, module[0].weight)


def test_a_parameter_without_a_shape_cannot_be_saved() -> None:
    with pytest.raises(SaveError, match=r"'0\.weight' has no shape yet"):
        adapt(nn.Sequential(nn.LazyLinear(3))).state()


def test_state_aliases_live_memory() -> None:
    module = model()
    dense = adapt(module).state()["dense"]
    assert dense["0.weight"].data_ptr() == module[0].weight.data_ptr()
    assert not dense["0.weight"].requires_grad
