"""The training that is saved: TorchRec's DLRM on Criteo-shaped tables, ordinary steps and steps that touch many rows.

It must not know checkpoints.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from popularity import table_sizes
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import criteo
import synthetic
from dlrm_model import start_processes, to_torch

OPTIMIZER = "row-wise Adagrad (fused), Adagrad (dense)"
_LEARNING_RATE = 0.02
_POOL = 32


class Training:
    """A model, its dense optimizer and its steps.

    Attributes:
        table_rows: rows of all tables.
        steps: how many have been made.
        touched: rows that an interval changes, by table, beside those of one ordinary step.
    """

    def __init__(self, *, rows: int, dim: int, batch: int, share: float, seed: int = 0) -> None:
        device = torch.device("cpu") if dist.is_initialized() else start_processes()
        torch.manual_seed(seed)
        self.sizes = table_sizes(rows)
        self.table_rows = sum(self.sizes)
        self.steps = 0
        self.model = _model(self.sizes, dim, device)
        self.touched: Sequence[np.ndarray] = ()
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adagrad(p, lr=_LEARNING_RATE))
        pool = list(_ordinary_batches(batch, max(self.sizes), seed))
        self._pool = [to_torch(b, device) for b in pool]
        self._next = itertools.cycle(self._pool)
        self._batch, self._seed = batch, seed
        self._distinct = sum(np.unique(ids).size for ids in pool[0].ids)
        self.change(share)

    def close(self) -> None:
        dist.destroy_process_group()

    def change(self, share: float) -> None:
        """From now on an interval changes this share of all rows."""
        random = np.random.default_rng(self._seed)
        count = max(0, round(share * self.table_rows) - self._distinct)
        self.touch(_spread_rows(self.sizes, count, random))

    def touch(self, rows: Sequence[np.ndarray]) -> None:
        """From now on an interval changes these rows, ascending int64 by table, and those of one ordinary step."""
        self.touched = rows
        self._touching = _touching_batch(rows, self._pool[0], self._batch)

    def step(self) -> None:
        """One ordinary step, on ids as the fitted popularity gives them."""
        self._train(next(self._next))

    def rewind(self) -> None:
        """The next ordinary step gets the first batch again."""
        self._next = itertools.cycle(self._pool)

    def interval(self) -> None:
        """What changes the wanted share of all rows, always the same rows: uniformly random ones, then one ordinary
        step."""
        self.update_touched()
        self._train(self._pool[0])

    def update_touched(self) -> None:
        """One step that changes just the rows in ``touched``."""
        self._train(self._touching)

    def steps_per_second(self, seconds: float) -> float:
        begun, before = time.perf_counter(), self.steps
        while time.perf_counter() - begun < seconds:
            self.step()
        return (self.steps - before) / (time.perf_counter() - begun)

    def _train(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        loss, _ = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.steps += 1


def _model(sizes: Sequence[int], dim: int, device: torch.device) -> DistributedModelParallel:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for name, rows in zip(criteo.CATEGORICALS, sizes, strict=True)
    ]
    dlrm = DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=len(criteo.INTEGERS),
        dense_arch_layer_sizes=[128, 64, dim],
        over_arch_layer_sizes=[128, 64, 1],
        dense_device=device,
    )
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": _LEARNING_RATE, "eps": 1e-8}
    group = dist.GroupMember.WORLD
    return DistributedModelParallel(
        DLRMTrain(dlrm),
        # torch.distributed.checkpoint's async_save refuses ShardedTensor: state_dict() shall give DTensor.
        env=ShardingEnv(dist.get_world_size(), dist.get_rank(), group, output_dtensor=True),
        device=device,
        sharders=[EmbeddingBagCollectionSharder(fused_params=fused)],
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True),
    )


def _ordinary_batches(batch: int, cap: int, seed: int) -> Iterator[criteo.Batch]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "criteo.tsv"
        synthetic.write_file(path, _POOL * batch, seed)
        reader = criteo.CriteoReader(path, batch_size=batch, max_rows_per_table=cap)
        yield from itertools.islice(reader, _POOL)


def _spread_rows(sizes: Sequence[int], count: int, random: np.random.Generator) -> list[np.ndarray]:
    """Distinct uniformly random rows of each table, int64, ``count`` in all, as many per table as its size demands."""
    total = sum(sizes)
    return [np.sort(random.choice(n, round(count * n / total), replace=False, shuffle=False)) for n in sizes]


def _touching_batch(rows: Sequence[np.ndarray], like: Batch, batch: int) -> Batch:
    """One batch that looks up each of the rows once, spread over the samples."""
    samples = np.arange(batch)
    lengths = [np.full(batch, len(ids) // batch) + (samples < len(ids) % batch) for ids in rows]
    sparse = KeyedJaggedTensor(
        keys=list(criteo.CATEGORICALS),
        values=torch.from_numpy(np.concatenate(rows)),
        lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
    ).to(like.dense_features.device)
    return Batch(dense_features=like.dense_features, sparse_features=sparse, labels=like.labels)
