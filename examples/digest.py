"""One hash over everything that training changes: tables, fused and dense optimizer state, dense parameters.

Whole tensors are hashed in the order of their names, so that how tables are sharded has no part in the definition; it
knows TorchRec, and nothing of checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer


def digest(model: DistributedModelParallel, dense_optimizer: KeyedOptimizer) -> str:
    """32 hex digits on rank 0, an empty string on the others; all ranks call it together.

    Tables spread over ranks are gathered one after the other: rank 0 needs room for the largest.
    """
    state: dict[str, Any] = {f"model {name}": value for name, value in model.state_dict().items()}
    state |= {f"fused {name}": value for name, value in _leaves(model.fused_optimizer.state_dict()["state"])}
    state |= {f"dense {name}": value for name, value in _leaves(dense_optimizer.state_dict())}
    state["fused iterations"] = _fused_iterations(model)
    total = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        whole = _gather(value) if isinstance(value, ShardedTensor) else value
        if dist.get_rank() == 0:
            total.update(f"{name}: {_fingerprint(whole)}\n".encode())
    dist.barrier()  # rank 0 still receives what another rank has sent
    return total.hexdigest()[:32] if dist.get_rank() == 0 else ""


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{index}")
    else:
        yield path, tree


def _fingerprint(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    host = value.detach().cpu().contiguous()
    content: Any = host.reshape(-1).view(torch.uint8).numpy()
    return f"{host.dtype} {tuple(host.shape)} {xxhash.xxh3_128_hexdigest(content)}"


def _gather(sharded: ShardedTensor) -> torch.Tensor | None:
    """The whole tensor on rank 0, None elsewhere; shards travel one by one in an order that all ranks know."""
    rank = dist.get_rank()
    mine = {tuple(shard.metadata.shard_offsets): shard.tensor.detach() for shard in sharded.local_shards()}
    metadata = sharded.metadata()
    whole = torch.empty(metadata.size, dtype=metadata.tensor_properties.dtype) if rank == 0 else None
    for shard in sorted(metadata.shards_metadata, key=lambda shard: tuple(shard.shard_offsets)):
        offsets = tuple(shard.shard_offsets)
        placement = shard.placement
        assert placement is not None
        owner = placement.rank()
        if rank == owner and rank != 0:
            dist.send(mine[offsets].contiguous(), dst=0)
        if whole is None:
            continue
        if owner == 0:
            part = mine[offsets]
        else:
            device = placement.device() if dist.get_backend() == "nccl" else "cpu"
            part = torch.empty(shard.shard_sizes, dtype=whole.dtype, device=device)
            dist.recv(part, src=owner)
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, shard.shard_sizes, strict=True))] = part
    return whole


def _fused_iterations(model: torch.nn.Module) -> int:
    """How many batches the fused optimizers have seen; their own state_dict leaves it out."""
    # Lookups are kept in a plain list that Module.modules() does not enter.
    lookups = [lookup for module in model.modules() for lookup in getattr(module, "_lookups", [])]
    counts = [
        int(part.iter)
        for lookup in lookups
        for part in lookup.modules()
        if isinstance(getattr(part, "iter", None), torch.Tensor)
    ]
    most = torch.tensor(max(counts, default=0))
    if dist.get_backend() == "nccl":
        most = most.cuda()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)
