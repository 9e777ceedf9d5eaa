"""A tiny click model whose tables can be sharded in every way, trained on ids that the ranks draw for themselves.

It must not know what any test looks for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from rank_plans import DIM, ROWS, ROWWISE, Plan
from rank_processes import connect
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
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
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

FEATURES = {"a": ["x"], "b": ["y", "x"], "c": ["z"], "d": ["y"], "e": ["w"]}  # x feeds a and b, b has two features
KEYS = ["x", "y", "z", "w"]
IDS = {"x": 31, "y": 17, "z": 23, "w": 7}
BAGS = 3


class Clicks(nn.Module):
    def __init__(self, bags: EmbeddingBagCollection) -> None:
        super().__init__()
        self.bags = bags
        self.dropout = nn.Dropout(0.25)
        self.over = nn.Linear(DIM * sum(map(len, FEATURES.values())), 1, bias=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        self.seen += float(ids.values().sum())  # every rank has its own
        return self.over(self.dropout(self.bags(ids).values())).pow(2).mean()


def collection(device: str = "cpu") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=torch.device(device),
        tables=[
            EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=FEATURES[name])
            for name, rows in ROWS.items()
        ],
    )


def _sharding(way: str) -> Callable[..., Any]:
    kind, _, dense = way.partition("!")
    if kind.startswith("tw") and kind[2:].isdigit():
        make = table_wise(rank=int(kind[2:]))
    elif kind.startswith("cw"):
        make = column_wise(ranks=[int(rank) for rank in kind[2:]])
    else:
        make = {"rw": row_wise, "twrw": lambda: table_row_wise(host_index=0), "dp": data_parallel}[kind]()

    def with_kernel(*arguments: Any) -> Any:
        sharding = make(*arguments)  # on the CPU the kernel is dense unless one asks
        if kind != "dp" and not dense:
            sharding.compute_kernel = "fused"
        return sharding

    return with_kernel


def build(plan: Plan, fused: str = ROWWISE, seed: int = 1) -> tuple[DistributedModelParallel, Any]:
    """The sharded model and the optimizer of everything that has none of its own."""
    if not dist.is_initialized():
        connect()
    torch.manual_seed(seed + dist.get_rank())
    model = Clicks(collection())
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType[fused], "learning_rate": 0.1, "eps": 1e-8}
    )
    world_size = dist.get_world_size()
    shards = construct_module_sharding_plan(
        model.bags, per_param_sharding={name: _sharding(way) for name, way in plan.items()}, sharder=sharder,
        local_size=world_size, world_size=world_size, device_type="cpu",
    )  # fmt: skip
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), sharders=[sharder], plan=ShardingPlan(plan={"bags": shards}),
        # Buckets that are rebuilt after a process's first iteration would add up in another order after a resume.
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True),
    )  # fmt: skip
    parameters = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    return parallel, KeyedOptimizerWrapper(parameters, lambda p: dense_optimizer(fused)(p, lr=0.1, eps=1e-8))


def dense_optimizer(fused: str) -> Any:
    """The torch optimizer that has the same state for a row as a fused one."""
    return RowWiseAdagrad if fused == ROWWISE else torch.optim.Adagrad


class Reader:
    """Batches that depend on the position alone; every rank has its own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 0

    def read(self) -> KeyedJaggedTensor:
        self.position += 1
        generator = torch.Generator().manual_seed(1000 * self.position + self.rank)
        lengths = torch.randint(0, 4, (len(KEYS), BAGS), generator=generator)
        values = [
            torch.randint(0, IDS[k], (int(n),), generator=generator) for k, n in zip(KEYS, lengths.sum(1), strict=True)
        ]
        return KeyedJaggedTensor(keys=KEYS, values=torch.cat(values), lengths=lengths.reshape(-1))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def step(model: nn.Module, optimizer: Any, reader: Reader) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(reader.read())
    loss.backward()
    optimizer.step()
    return loss.detach()


Whole = dict[str, torch.Tensor]
"""``<table>.<field>`` and dense tensors by name, whatever the sharding."""


def whole(model: nn.Module, optimizer: Any) -> Whole:
    """What training changes and all ranks can know. Row-wise state of column shards has no one value per row: that of
    one of them stands here."""
    parts: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                part = (tuple(value.size()), tuple(shard.metadata.shard_offsets), shard.tensor.detach().clone())
                parts.setdefault(name, []).append(part)
        elif isinstance(value, torch.Tensor):
            parts[name] = [(tuple(value.shape), (0,) * value.dim(), value.detach().clone())]

    weights = model.state_dict()
    for name, value in weights.items():
        add(name.replace("bags.embedding_bags.", ""), value)
    fused = getattr(model, "fused_optimizer", None)
    states = dict(fused.state_dict()["state"]) if fused is not None else {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states |= {names[id(parameter)]: state for parameter, state in optimizer.state.items() if id(parameter) in names}
    for name, state in states.items():
        for key, value in state.items():
            # A dense kernel's optimizer knows its own shard alone.
            sharded = isinstance(value, ShardedTensor)
            if ("momentum" in key or key == "sum") and sharded == isinstance(weights.get(name), ShardedTensor):
                add(name.replace("bags.embedding_bags.", "").replace("weight", "sum"), value)
    parts.pop("seen", None)
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, parts)
    found: Whole = {}
    for rank in everything:
        for name, pieces in rank.items():
            for shape, offsets, piece in pieces:
                piece = piece.reshape(piece.shape or (1,))
                target = found.setdefault(name, torch.full(shape or (1,), float("nan")))
                if target.dim() != piece.dim():
                    piece = piece.reshape(target.shape)
                target[tuple(slice(o, o + n) for o, n in zip(offsets or (0,), piece.shape, strict=True))] = piece
    return found


def digest(model: nn.Module, optimizer: Any) -> str:
    """Of all state of all ranks, buffers and random generators included."""
    whole_state = whole(model, optimizer)
    total = hashlib.sha256()
    for name in sorted(whole_state):
        total.update(
            f"{name} {tuple(whole_state[name].shape)}".encode() + whole_state[name].contiguous().numpy().tobytes()
        )
    mine = hashlib.sha256()
    for _, table in sorted(local_fields(model).items()):
        mine.update(table.contiguous().numpy().tobytes())
    for name, state in sorted(optimizer.state_dict()["state"].items()):
        for key, value in sorted(state.items()):
            mine.update(f"{name} {key} {value.tolist() if isinstance(value, torch.Tensor) else value}".encode())
    mine.update(model.state_dict()["seen"].numpy().tobytes() + torch.get_rng_state().numpy().tobytes())
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, mine.hexdigest())
    return hashlib.sha256((total.hexdigest() + "".join(everything)).encode()).hexdigest()[:16]


def local_fields(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank's kernels hold, each shard with its row-wise state, straight from the TBEs."""
    found: dict[str, torch.Tensor] = {}
    for module in model.modules():
        for lookup in getattr(module, "_lookups", []):
            for kernel in lookup.modules():
                tbe = kernel._modules.get("_emb_module")
                if tbe is None or not hasattr(tbe, "split_optimizer_states"):
                    continue
                for i, (weight, states) in enumerate(
                    zip(tbe.split_embedding_weights(), tbe.split_optimizer_states(), strict=True)
                ):
                    config = kernel._config.embedding_tables[i]
                    place = f"{config.name} {config.local_metadata.shard_offsets if config.local_metadata else ''} {i}"
                    found[f"{place} weight"] = weight.detach()
                    for n, state in enumerate(states):
                        found[f"{place} {n}"] = state.detach()
    return found
