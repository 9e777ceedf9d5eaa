"""Small training runs that a checkpoint must bring back whole, and deep copies of everything that they consist of.

It must not know checkpoints: what a copy holds is taken from torch, numpy and Python alone.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn

ROWS, SMALL_ROWS, DIM, SMALL_DIM, BATCH, BAG = 61, 17, 8, 3, 4, 3
LAYOUTS = ("adagrad", "sparse_adam", "sgd", "dense_gradients", "fused")


class Reader:
    """Says how much was read, with a state that holds plain values and arrays of several kinds."""

    def __init__(self) -> None:
        self.position = 0
        self.seen = np.zeros(5, dtype=np.int32)

    def read(self) -> None:
        self.seen[self.position % 5] += 1
        self.position += 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seen": self.seen, "window": (self.position, None, 2**60)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state["window"] == (state["position"], None, 2**60)
        self.position = state["position"]
        self.seen = state["seen"].copy()


class PlainTables(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.small = nn.Embedding(SMALL_ROWS, SMALL_DIM, sparse=sparse)

    def forward(self, ids: torch.Tensor, small_ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.bag(ids), self.small(small_ids)], 1)


class FusedTables(nn.Module):
    """Two tables of one FBGEMM TBE with row-wise Adagrad; the last dim must be a multiple of 4."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"fbgemm_gpu\..*")
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
        place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(ROWS, DIM, *place), (SMALL_ROWS, 4, *place)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1,
        )  # fmt: skip
        self.tbe.init_embedding_weights_uniform(-0.1, 0.1)

    def forward(self, ids: torch.Tensor, small_ids: torch.Tensor) -> torch.Tensor:
        bags = torch.arange(0, ids.numel() + 1, BAG)
        offsets = torch.cat([bags, ids.numel() + torch.arange(1, len(small_ids) + 1)])
        out: torch.Tensor = self.tbe(torch.cat([ids.reshape(-1), small_ids]), offsets)
        return out[:, : DIM + SMALL_DIM]


class Model(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.tables = FusedTables() if layout == "fused" else PlainTables(sparse=layout != "dense_gradients")
        self.over = nn.Sequential(nn.Linear(DIM + SMALL_DIM, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1))

    def forward(self, ids: torch.Tensor, small_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.over(self.tables(ids, small_ids))
        return out


class Run:
    """A model, its optimizers, a scheduler and a reader. Batches come from all three global random generators."""

    def __init__(self, layout: str = "adagrad", seed: int = 0) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.layout = layout
        self.model = Model(layout)
        self.reader = Reader()
        self.steps_done = 0
        dense = [*self.model.over.parameters()]
        tables = [] if layout == "fused" else [*self.model.tables.parameters()]
        if layout == "dense_gradients":
            dense.append(tables.pop())
        self.optimizers: dict[str, torch.optim.Optimizer] = {"dense": torch.optim.Adam(dense, lr=0.01)}
        make: Callable[..., torch.optim.Optimizer] | None = {
            "adagrad": torch.optim.Adagrad, "dense_gradients": torch.optim.Adagrad,
            "sparse_adam": torch.optim.SparseAdam, "sgd": torch.optim.SGD,
        }.get(layout)  # fmt: skip
        if make is not None:
            self.optimizers["sparse"] = make(tables, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers["dense"], 3, 0.9)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a Checkpointer."""
        return {"optimizer": self.optimizers, "state": {"reader": self.reader, "scheduler": self.scheduler}}

    def train(self, steps: int = 1) -> torch.Tensor:
        loss = torch.zeros(())
        for _ in range(steps):
            self.reader.read()
            ids = torch.from_numpy(np.random.randint(0, ROWS, (BATCH, BAG)))
            small_ids = torch.randint(0, SMALL_ROWS, (BATCH,))
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
            loss = (self.model(ids, small_ids).squeeze(1) - random.random()).pow(2).mean()
            loss.backward()
            for optimizer in self.optimizers.values():
                optimizer.step()
            self.scheduler.step()
            self.steps_done += 1
        return loss.detach()

    def copy(self) -> dict[str, Any]:
        """Everything, deep: weights, optimizer fields and counters, buffers, state objects, random generators."""
        everything: dict[str, Any] = {
            "model": dict(self.model.state_dict()),
            "optimizers": {name: o.state_dict() for name, o in self.optimizers.items()},
            "reader": self.reader.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": (torch.get_rng_state(), np.random.get_state(), random.getstate()),
        }
        if self.layout == "fused":
            tbe: Any = self.model.tables.tbe
            everything["tbe"] = {
                "weights": tbe.split_embedding_weights(), "states": tbe.split_optimizer_states(),
                "iter": tbe.iter, "iter_cpu": getattr(tbe, "iter_cpu", None),
            }  # fmt: skip
        return deepcopy(_detached(everything))

    def rows_of(self, table: str) -> torch.Tensor:
        """Live weights of a table by its name in a checkpoint."""
        module: Any = self.model
        for part in table.split("."):
            module = getattr(module, part)
        weight: torch.Tensor = module.weight
        return weight.detach()


def truth(layout: str, steps: int) -> list[dict[str, Any]]:
    """The states of a run that nobody interrupts, by step."""
    run = Run(layout)
    states = [run.copy()]
    for _ in range(steps):
        run.train()
        states.append(run.copy())
    return states


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Where two copies differ: types, keys, dtypes, shapes, or any bit of a tensor or array."""
    if type(a) is not type(b):
        yield f"{path}: {type(a).__name__} and {type(b).__name__}"
    elif isinstance(a, Mapping):
        if a.keys() != b.keys():
            yield f"{path}: keys {sorted(map(str, a.keys() ^ b.keys()))}"
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield f"{path}: {len(a)} and {len(b)} members"
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{path}[{index}]")
    elif isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            yield f"{path}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        elif not torch.equal(_bits(a), _bits(b)):
            yield f"{path}: values of {tuple(a.shape)} at {(_bits(a) != _bits(b)).nonzero()[:3].tolist()}"
    elif isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
            yield f"{path}: arrays {a.dtype}{a.shape} and {b.dtype}{b.shape}"
    elif a != b and not (a != a and b != b):
        yield f"{path}: {a!r} and {b!r}"


def assert_same(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    found = [*differences(a, b)]
    assert not found, "\n".join(found[:10])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _detached(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_detached(member) for member in value)
    return value
