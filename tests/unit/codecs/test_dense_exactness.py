"""Dense parameters and their optimizers beside quantized tables: exact whatever the codecs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from incremental_ckpt import Checkpointer, Settings
from incremental_ckpt.storage import MemoryStore

QUICK = Settings(low_priority=False)


class Model(nn.Module):
    """A table, and dense layers that look like one: as many columns, float32 and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(60, 64, mode="sum", sparse=True)
        self.top = nn.Linear(64, 64)
        self.last = nn.Linear(64, 8).to(torch.bfloat16)
        self.register_buffer("mean", torch.randn(60, 64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.top(self.bag(ids)).to(torch.bfloat16)).float().sum()


def job(seed: int) -> tuple[Model, dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    model = Model()
    dense = [*model.top.parameters(), *model.last.parameters()]
    return model, {
        "rows": torch.optim.SparseAdam([model.bag.weight], lr=0.01),
        "dense": torch.optim.Adam(dense, lr=0.01),
    }


def train(model: Model, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    for _ in range(3):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        model(torch.randint(60, (8, 3))).backward()
        for optimizer in optimizers.values():
            optimizer.step()


@pytest.mark.parametrize(
    "codecs",
    [
        {"codec": "int8", "optimizer_codec": "bf16"},
        {"codec": "int2", "optimizer_codec": "bf16"},
        {"codec": "auto", "optimizer_codec": "bf16"},
        {"codec": "bf16", "optimizer_codec": "bf16"},
    ],
)
def test_all_but_rows_comes_back_bit_for_bit(codecs: dict[str, Any], store_name: str) -> None:
    model, optimizers = job(0)
    train(model, optimizers)
    with Checkpointer(model, MemoryStore(store_name), optimizer=optimizers, settings=QUICK, **codecs) as c:
        c.save_checkpoint(1).wait()
    again, its_optimizers = job(5)
    with Checkpointer(again, MemoryStore(store_name), optimizer=its_optimizers, settings=QUICK) as c:
        assert c.resume_from_checkpoint() is not None
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value) == (name != "bag.weight"), name
    found = its_optimizers["dense"].state_dict()["state"]
    for index, state in optimizers["dense"].state_dict()["state"].items():
        assert found[index].keys() == state.keys()
        assert all(torch.equal(found[index][name], value) for name, value in state.items())
    rows, its_rows = (o["rows"].state_dict()["state"][0]["exp_avg"] for o in (optimizers, its_optimizers))
    assert not torch.equal(rows, its_rows)
