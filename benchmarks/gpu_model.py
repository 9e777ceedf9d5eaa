"""The training that gpu_check measures: large tables under one linear layer, FBGEMM's if installed, else PyTorch's.

It must not know checkpoints, nor need TorchRec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class PlainTables(nn.Module):
    """nn.EmbeddingBag tables with sparse gradients."""

    name = "nn.EmbeddingBag, Adagrad"

    def __init__(self, sizes: Sequence[int], dim: int, device: torch.device) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(n, dim, mode="sum", sparse=True, device=device, include_last_offset=False) for n in sizes
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 ``[tables, batch, bag]``; returns ``[batch, tables * dim]``."""
        return torch.cat([bag(each) for bag, each in zip(self.bags, ids, strict=True)], dim=1)


class FbgemmTables(nn.Module):
    """One FBGEMM TBE with fused row-wise Adagrad."""

    name = "FBGEMM TBE, row-wise Adagrad"

    def __init__(self, sizes: Sequence[int], dim: int, device: torch.device) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        super().__init__()
        on_gpu = device.type == "cuda"
        place = (
            (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        )
        self.tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(n, dim, *place) for n in sizes],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.02,
            device=device if on_gpu else None,
        )  # fmt: skip
        self.tbe.init_embedding_weights_uniform(-0.1, 0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        bags = ids.shape[0] * ids.shape[1]
        offsets = torch.arange(bags + 1, device=ids.device) * ids.shape[2]
        out: torch.Tensor = self.tbe(ids.reshape(-1), offsets)
        return out


class GpuTraining:
    """A model, its dense optimizer and its steps.

    Args:
        fbgemm: whether the tables are FBGEMM's.
        rows: of all tables together.
        share: of the rows that ``interval`` changes, always the same ones.
    """

    def __init__(
        self, device: torch.device, *, fbgemm: bool, rows: int, tables: int, dim: int, batch: int, share: float
    ) -> None:
        torch.manual_seed(0)
        torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns where nothing is chosen
        self._sizes: dict[str, Any] = {
            "fbgemm": fbgemm, "rows": rows, "tables": tables, "dim": dim, "batch": batch, "share": share,
        }  # fmt: skip
        self.device, self.table_rows = device, rows
        sizes = [rows // tables] * tables
        self.tables = (FbgemmTables if fbgemm else PlainTables)(sizes, dim, device)
        self.model = nn.ModuleDict({"tables": self.tables, "over": nn.Linear(tables * dim, 1, device=device)})
        parameters = self.model["over"].parameters() if fbgemm else self.model.parameters()
        self.optimizer = torch.optim.Adagrad(parameters, lr=0.02)
        self.steps = 0
        random = torch.Generator().manual_seed(0)
        self._ids = torch.randint(sizes[0], (tables, batch, 1), generator=random).to(device)
        # As many samples as before, each with a bag of as many distinct rows as it takes.
        bag = max(1, round(share * sizes[0] / batch))
        picked = torch.stack([torch.randperm(sizes[0], generator=random)[: batch * bag] for _ in range(tables)])
        self._touching = picked.reshape(tables, -1, bag).to(device)

    def untrained(self) -> GpuTraining:
        """Another one of the same sizes."""
        return GpuTraining(self.device, **self._sizes)

    def step(self) -> None:
        self._train(self._ids)

    def interval(self) -> None:
        """What changes the wanted share of all rows."""
        self._train(self._touching)

    def _train(self, ids: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model["over"](self.model["tables"](ids)).square().mean().backward()
        self.optimizer.step()
        self.steps += 1
