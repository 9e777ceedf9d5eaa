"""TorchRec's DLRM for Criteo: distributed, with fused row-wise Adagrad for the tables and Adagrad for the rest.

It builds a model and its dense optimizer from plain numbers; it knows nothing of files or checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import criteo
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

PLANNER, MIXED = "planner", "mixed"


def start_processes() -> torch.device:
    """Join torchrun's processes, or be the only one; returns this process's device."""
    # TorchRec's planner asks for it.
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def make_repeatable(seed: int, threads: int) -> None:
    """Same numbers, same machine: same bits. Every rank draws its own initial rows; dense parameters are rank 0's."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)
    torch.manual_seed(seed + dist.get_rank())


def build_model(
    table_sizes: Sequence[int], embedding_dim: int, learning_rate: float, device: torch.device, sharding: str = PLANNER
) -> tuple[DistributedModelParallel, KeyedOptimizer]:
    """sharding: PLANNER, MIXED, or one of the ways that ``_plan`` knows."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=embedding_dim, feature_names=[name])
        for name, rows in zip(criteo.CATEGORICALS, table_sizes, strict=True)
    ]
    dlrm = DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=len(criteo.INTEGERS),
        dense_arch_layer_sizes=[128, 64, embedding_dim],
        over_arch_layer_sizes=[128, 64, 1],
        dense_device=device,
    )
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": learning_rate, "eps": 1e-8}
    train = DLRMTrain(dlrm)
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    model = DistributedModelParallel(
        train,
        device=device,
        sharders=[sharder],
        plan=None if sharding == PLANNER else _plan(train, sharding, sharder, device),
        # DDP's other settings rebuild its buckets after the first iteration of a process: on 3 and more ranks a resumed
        # run would add up gradients in another order than an uninterrupted one.
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True),
    )
    # The planner makes the smallest tables data-parallel: they have no fused optimizer and need a torch optimizer.
    # Choosing by "has no optimizer of its own" keeps them; choosing by name would leave them untrained.
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    tables_apart = {name: p for name, p in parameters.items() if "embedding_bags." in name}
    dense_parameters = {name: p for name, p in parameters.items() if name not in tables_apart}
    dense = KeyedOptimizerWrapper(dense_parameters, lambda p: torch.optim.Adagrad(p, lr=learning_rate))
    optimizers = [dense]
    if tables_apart:
        # The state that fused tables have, so that a table may be sharded in another way when the run is resumed.
        row_wise = KeyedOptimizerWrapper(tables_apart, lambda p: RowWiseAdagrad(p, lr=learning_rate, eps=1e-8))
        optimizers.append(row_wise)
    return model, CombinedOptimizer(optimizers)


def _plan(
    train: DLRMTrain, sharding: str, sharder: EmbeddingBagCollectionSharder, device: torch.device
) -> ShardingPlan:
    """What the planner would not choose, or (row-wise on the CPU) does not offer."""
    ranks = dist.get_world_size()
    makers: dict[str, Callable[[int], Any]] = {
        "table-wise": lambda i: table_wise(rank=i % ranks),
        "row-wise": lambda _: row_wise(),
        "column-wise": lambda i: column_wise(ranks=[i % ranks, (i + 1) % ranks]),
        "table-row-wise": lambda _: table_row_wise(host_index=0),
        "data-parallel": lambda _: data_parallel(),
    }
    ways = list(makers) if sharding == MIXED else [sharding]
    bags = train.model.sparse_arch.embedding_bag_collection
    per_table = {}
    for index, config in enumerate(bags.embedding_bag_configs()):
        way = ways[index % len(ways)]
        per_table[config.name] = _fused_unless(way == "data-parallel", makers[way](index))
    shards = construct_module_sharding_plan(
        bags,
        per_param_sharding=per_table,
        sharder=sharder,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        world_size=ranks,
        device_type=device.type,
    )
    return ShardingPlan(plan={"model.sparse_arch.embedding_bag_collection": shards})


def _fused_unless(dense: bool, make: Callable[..., Any]) -> Callable[..., Any]:
    """On the CPU kernels are dense unless one asks for fused ones."""

    def with_kernel(*arguments: Any) -> Any:
        made = make(*arguments)
        made.compute_kernel = "dense" if dense else "fused"
        return made

    return with_kernel


def to_torch(batch: criteo.Batch, device: torch.device) -> Batch:
    samples = len(batch.labels)
    sparse = KeyedJaggedTensor(
        keys=list(criteo.CATEGORICALS),
        values=torch.from_numpy(batch.ids).reshape(-1),
        lengths=torch.ones(len(criteo.CATEGORICALS) * samples, dtype=torch.int32),
    )
    return Batch(
        dense_features=torch.from_numpy(batch.dense), sparse_features=sparse, labels=torch.from_numpy(batch.labels)
    ).to(device)
