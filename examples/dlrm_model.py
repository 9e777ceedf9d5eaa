"""TorchRec's DLRM for Criteo: distributed, with fused row-wise Adagrad for the tables and Adagrad for the rest.

It builds a model and its dense optimizer from plain numbers; it knows nothing of files or checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import criteo
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter


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
    table_sizes: Sequence[int], embedding_dim: int, learning_rate: float, device: torch.device
) -> tuple[DistributedModelParallel, KeyedOptimizer]:
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
    model = DistributedModelParallel(
        DLRMTrain(dlrm),
        device=device,
        sharders=[EmbeddingBagCollectionSharder(fused_params=fused)],
        # DDP's other settings rebuild its buckets after the first iteration of a process: on 3 and more ranks a resumed
        # run would add up gradients in another order than an uninterrupted one.
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True),
    )
    # The planner makes the smallest tables data-parallel: they have no fused optimizer and belong to the dense one.
    # Choosing by "has no optimizer of its own" keeps them; choosing by name would leave them untrained.
    dense_parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense_parameters, lambda params: torch.optim.Adagrad(params, lr=learning_rate))
    return model, optimizer


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
