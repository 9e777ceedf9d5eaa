"""A table that SparseAdam trains, whose columns have gradients of very different sizes, as real ones have."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from incremental_ckpt import Checkpointer, Settings
from incremental_ckpt.storage import MemoryStore

ROWS, DIM = 60, 64
MOMENTS = ("exp_avg", "exp_avg_sq")
QUICK = Settings(low_priority=False)


class AdamBag:
    """Moments by name are live views."""

    def __init__(self, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)
        weights = torch.randn(ROWS, DIM, generator=self._random)
        self.model = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, _weight=weights)
        self.optimizer = torch.optim.SparseAdam(self.model.parameters(), lr=0.01)

    def train(self, steps: int, scales: torch.Tensor) -> None:
        """scales: of each column's gradients. Every row is in every step."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            signs = torch.randn(ROWS, DIM, generator=self._random) * scales
            (self.model(torch.arange(ROWS)[:, None]) * signs).sum().backward()
            self.optimizer.step()

    @property
    def weights(self) -> torch.Tensor:
        return self.model.weight.detach().clone()

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.state_dict()["state"][0]
        return {name: state[name] for name in MOMENTS}

    def checkpointer(self, store: str, **arguments: Any) -> Checkpointer:
        arguments = {"settings": QUICK, "kind": "consecutive", **arguments}
        return Checkpointer(self.model, MemoryStore(store), optimizer=self.optimizer, **arguments)

    def resume(self, store: str) -> None:
        with self.checkpointer(store) as c:
            assert c.resume_from_checkpoint() is not None
