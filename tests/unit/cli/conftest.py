"""A store that a small run wrote, and ickpt run in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from incremental_ckpt import Checkpointer
from incremental_ckpt.cli import main

ROWS = {"users": 200, "items": 50}


@dataclass(frozen=True)
class Answer:
    """What a command answered; ``err`` is checked to be one line at most."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Ickpt = Callable[..., Answer]


class Towers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = torch.nn.EmbeddingBag(ROWS["users"], 8, sparse=True, mode="sum")
        self.items = torch.nn.EmbeddingBag(ROWS["items"], 4, sparse=True, mode="sum")
        self.top = torch.nn.Linear(12, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.users(ids), self.items(ids % ROWS["items"])], 1))


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three deltas, at steps 10, 20, 30 and 40; the loss of step 30 is no number."""
    place = tmp_path_factory.mktemp("runs") / "17"
    torch.manual_seed(0)
    model = Towers()
    rows = torch.optim.Adagrad([model.users.weight, model.items.weight])
    dense = torch.optim.Adam(model.top.parameters())
    with Checkpointer(model, place, optimizer={"rows": rows, "dense": dense}, kind="consecutive") as ckpt:
        ckpt.resume_from_checkpoint()
        for step in (10, 20, 30, 40):
            rows.zero_grad()
            dense.zero_grad()
            # Each step looks up other rows: four users and, modulo 50, four items.
            model(torch.arange(step, step + 4).reshape(2, 2)).sum().backward()
            with torch.sparse.check_sparse_tensor_invariants(True):  # undecided, torch warns of it
                rows.step()
            dense.step()
            loss = float("nan") if step == 30 else 1 / step
            metrics = {"auc": 0.5 + step / 100, "lift": float("inf")} if step > 10 else None
            ckpt.save_checkpoint(step, epoch=step // 20, loss=loss, metrics=metrics).wait()
    return place


@pytest.fixture
def place(written: Path, tmp_path: Path) -> Path:
    """A copy of the store, to be damaged at will."""
    return Path(shutil.copytree(written, tmp_path / "17"))


@pytest.fixture
def ickpt(capfd: pytest.CaptureFixture[str]) -> Ickpt:
    def run(*args: object) -> Answer:
        code = main([str(arg) for arg in args])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        assert err.count("\n") == (1 if code else 0), err
        assert err.startswith("ickpt: ") == bool(code)
        return Answer(code, out, err)

    return run
