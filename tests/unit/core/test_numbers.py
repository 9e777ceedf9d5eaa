"""What a loss and a metric may be: numbers, and tensors of one; told by name where they are something else."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from incremental_ckpt import Checkpointer, EverySteps, arguments
from incremental_ckpt.storage import MemoryStore

NUMBERS: dict[str, Any] = {
    "int": 3, "float": 3.0, "np.float32": np.float32(3), "np.int64": np.int64(3), "array": np.array([3.0]),
    "tensor": torch.tensor(3), "of one": torch.tensor([3.0], requires_grad=True),
    "bfloat16": torch.tensor(3.0).bfloat16(), "Fraction": Fraction(3), "Decimal": Decimal(3),
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "True": True, "False": False, "np.True_": np.True_, "tensor of bool": torch.tensor(True),
    "array of bool": np.array([False]), "str": "3.0", "array of str": np.array("3.0"), "bytes": b"3",
    "bytearray": bytearray(b"3"), "two": torch.ones(2), "complex": 3j, "None in a list": [None],
}  # fmt: skip


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
def test_a_number_is_taken(value: Any) -> None:
    assert arguments.number("loss", value) == 3.0
    assert type(arguments.number("loss", value)) is float


@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS)
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^loss must be a number or a tensor of one element, not "):
        arguments.number("loss", value)
    with pytest.raises(TypeError, match=r"^metrics\['auc'\] must be a number or a tensor of one element, not "):
        arguments.numbers("metrics", {"auc": value})


@pytest.mark.parametrize(
    "wrong", [{"loss": True}, {"metrics": {"auc": "0.5"}}, {"metrics": {"auc": torch.tensor(True)}}]
)
@pytest.mark.parametrize("call", ["step", "save_checkpoint"])
def test_a_save_with_one_is_refused_and_the_next_one_is_made(call: str, wrong: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 1)
    with Checkpointer(model, MemoryStore(), when=EverySteps(1)) as ckpt:
        ckpt.save_checkpoint(1).wait()
        with pytest.raises(TypeError, match="must be a number or a tensor of one element"):
            getattr(ckpt, call)(2, **wrong)
        info = ckpt.save_checkpoint(1001, loss=0.5).wait()
    assert (info.seq, info.step, info.loss) == (2, 1001, 0.5)


@pytest.mark.parametrize("wrong", [{"loss": True}, {"loss": "0.5"}, {"metrics": {"auc": False}}])
def test_a_plain_mistake_is_told_at_the_first_step_and_not_at_the_first_save(wrong: dict[str, Any]) -> None:
    with Checkpointer(torch.nn.Linear(2, 1), MemoryStore(), when=EverySteps(1000)) as ckpt:
        with pytest.raises(TypeError, match="must be a number or a tensor of one element, not "):
            ckpt.step(1, **wrong)
        assert ckpt.step(1, loss=0.5) is None


def test_no_tensor_is_read_where_no_save_is_due() -> None:
    class Unread(torch.Tensor):
        def item(self) -> float:
            pytest.fail("a read waits for the device")

    loss = torch.tensor(1.0).as_subclass(Unread)
    with Checkpointer(torch.nn.Linear(2, 1), MemoryStore(), when=EverySteps(1000)) as ckpt:
        assert ckpt.step(1, loss=loss, metrics={"auc": loss}) is None
