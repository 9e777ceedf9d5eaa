"""Whatever is given in the place of an argument, it is taken, or refused at once by the argument's name."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from incremental_ckpt import AutoCodec, KeepBest, Repository, arguments, export, open_store
from incremental_ckpt.errors import CheckpointError
from incremental_ckpt.storage import LocalStore, MemoryStore
from incremental_ckpt.storage.retry import Retry

ANYTHING: dict[str, Any] = {
    "None": None, "True": True, "0": 0, "-1": -1, "3": 3, "2.5": 2.5, "nan": float("nan"), "a str": "x", "no str": "",
    "bytes": b"x", "list": [], "dict": {}, "tuple": (1,), "object": object(), "class": int,
    "tensor": torch.tensor([1.0, 2.0]), "function": lambda *_: 0,
}  # fmt: skip
NUMBERS = {"0", "3", "2.5"}
FUNCTIONS = {"class", "function"}
NAMES = itertools.count()


def repository(tmp_path: Path) -> Repository:
    return Repository(MemoryStore(f"wrong-{next(NAMES)}"))


Call = Callable[[Any, Path], object]
CALLS: dict[str, tuple[Call, set[str]]] = {
    "KeepBest.count": (lambda value, _: KeepBest(value, "auc"), {"3"}),
    "KeepBest.metric": (lambda value, _: KeepBest(1, value), {"a str"}),
    "AutoCodec.failures_per_hour": (lambda value, _: AutoCodec(value, 2.0), NUMBERS),
    "AutoCodec.hours": (lambda value, _: AutoCodec(2.0, value), NUMBERS),
    "open_store.url": (lambda value, _: open_store(value), {"a str"}),
    "open_store.read_only": (lambda value, place: open_store(place, read_only=value), {"True"}),
    "open_store.retry": (lambda value, place: open_store(place, retry=value), {"None"}),
    "LocalStore.path": (lambda value, _: LocalStore(value), {"a str"}),
    "LocalStore.read_only": (lambda value, place: LocalStore(place, read_only=value), {"True"}),
    "MemoryStore.name": (lambda value, _: MemoryStore(value), {"a str", "no str"}),
    "Retry.first": (lambda value, _: Retry(first=value), NUMBERS),
    "Retry.longest": (lambda value, _: Retry(longest=value), NUMBERS),
    "Retry.within": (lambda value, _: Retry(within=value), NUMBERS),
    "Retry.sleep": (lambda value, _: Retry(sleep=value), FUNCTIONS),
    "Retry.clock": (lambda value, _: Retry(clock=value), FUNCTIONS),
    "Retry.uniform": (lambda value, _: Retry(uniform=value), FUNCTIONS),
    "export.repository": (lambda value, place: export(value, place / "out"), set()),
    "export.out": (lambda value, place: export(repository(place), value), set()),
    "export.format": (lambda value, place: export(repository(place), place / "out", value), set()),
    "export.seq": (lambda value, place: export(repository(place), place / "out", seq=value), set()),
    "export.optimizer": (lambda value, place: export(repository(place), place / "out", optimizer=value), set()),
    "check.deep": (lambda value, place: repository(place).check(deep=value), {"True"}),
}


def refuses_clearly(call: Callable[[], object]) -> bool:
    """Whether a call raises what says of an argument what is wrong with it, and not what fell over it further in."""
    try:
        call()
    except (TypeError, ValueError, CheckpointError) as error:
        raised_at = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        return "incremental_ckpt" in raised_at.parts and len(str(error)) > 12
    return False


@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_taken_is_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, taken = CALLS[name]
    monkeypatch.chdir(tmp_path)
    found = {what for what, value in ANYTHING.items() if not refuses_clearly(partial(call, value, tmp_path))}
    assert found == taken
    assert not list(tmp_path.iterdir()), "nothing was made"


@pytest.mark.parametrize("given", ["", b"", [], (), "x", [1], {}, [KeepBest], KeepBest])
def test_policies_are_policies_and_as_many_as_it_takes(given: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"when takes (a|at least one) policy,? such as EverySteps"):
        arguments.policies("when", given, "due", "EverySteps(1000)", least=1)


def test_no_policy_is_none_where_that_may_be() -> None:
    assert arguments.policies("keep", [], "kept", "KeepLast(3)") == ()


@pytest.mark.parametrize("value", [True, False])
def test_a_flag_is_no_number_of_a_step(value: bool) -> None:
    with pytest.raises(TypeError, match="step must be an int, not"):
        arguments.whole("step", value)


def test_a_loss_with_a_gradient_is_read_without_a_warning() -> None:
    loss = torch.ones(1, requires_grad=True) * 2
    assert arguments.number("loss", loss) == 2.0
