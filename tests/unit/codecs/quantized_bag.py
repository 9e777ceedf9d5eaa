"""A small table that codecs cannot wholly hold, through real saves and resumes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from codec_oracle import decoded_rows, encoded, ordinary
from torch import nn

from incremental_ckpt import Checkpointer, Repository, Settings
from incremental_ckpt.format.manifest import Entry
from incremental_ckpt.model import Field
from incremental_ckpt.storage import MemoryStore

ROWS, DIM = 80, 16
ODD = {3: np.nan, 17: np.inf, 40: -np.inf, 79: np.nan}
QUICK = Settings(low_priority=False)
TINY = Settings(pack_bytes=900, entry_bytes=256, low_priority=False)


class Bag:
    """A table with rows that no quantization holds, trained on a few rows at a time."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        rng = np.random.default_rng(seed)
        values = torch.from_numpy(ordinary(rng, ROWS, DIM)).to(dtype)
        for row, value in ODD.items():
            values[row, row % DIM] = value
        self.model = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, _weight=values)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    @property
    def rows(self) -> np.ndarray:
        found: np.ndarray = self.model.weight.detach().clone().view(torch.uint8).numpy()
        return found

    def train(self, rows: list[int]) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor([rows])).sum().backward()
        self.optimizer.step()

    def checkpointer(self, store: str, **arguments: Any) -> Checkpointer:
        arguments = {"optimizer": self.optimizer, "kind": "consecutive", "settings": QUICK, **arguments}
        return Checkpointer(self.model, MemoryStore(store), **arguments)


def after_restore(rows: np.ndarray, codec: str, dtype: str = "float32") -> np.ndarray:
    of = Field("weight", dtype, DIM)
    records, held = encoded(codec, rows, of)
    return np.where(held[:, None], decoded_rows(codec, records, of), rows)


def resumed(store: str, dtype: torch.dtype = torch.float32, **arguments: Any) -> Bag:
    again = Bag(seed=9, dtype=dtype)
    with again.checkpointer(store, **arguments) as c:
        assert c.resume_from_checkpoint() is not None
    return again


def entries_of_newest(store: str) -> list[Entry]:
    repository = Repository(MemoryStore(store))
    newest = repository.chain(repository.checkpoints()[-1].seq)[-1].seq
    ranks = repository.rank_manifests(repository.manifest(newest))
    return [entry for rank in ranks for shard in rank.shards for entry in shard.entries]
