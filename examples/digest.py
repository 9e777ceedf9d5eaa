"""One hash over everything that training changes: tables, fused and dense optimizer state, dense parameters.

Whole tensors are hashed in the order of their names, so that how tables are sharded has no part in the definition (but
for row-wise state of column-wise tables, which has a value for each column shard); it knows TorchRec, and nothing of
checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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
    steps = [_fused_iterations(model)]
    for name, values in model.fused_optimizer.state_dict()["state"].items():
        state |= {f"rows of {name}/{number}": value for number, value in enumerate(values.values())}
    for name, values in dense_optimizer.state_dict()["state"].items():
        if _TABLES in name:  # data-parallel: the same state under another name
            steps.append(int(values["step"]))
            rows = [value for key, value in values.items() if key != "step"]
            state |= {f"rows of {name}/{number}": value.squeeze(-1) for number, value in enumerate(rows)}
        else:
            state |= {f"dense {path}": value for path, value in _leaves(values, name)}
    state["steps with tables"] = max(steps)
    # A fused optimizer names the tables of its own rank only: what there is, is known when all ranks have told.
    ranks: list[dict[str, _Layout]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, {name: _layout(value) for name, value in state.items()})
    layouts = {name: layout for layouts in reversed(ranks) for name, layout in layouts.items()}
    total = hashlib.sha256()
    for name in sorted(layouts):
        whole = _gather(state.get(name), layouts[name])
        if dist.get_rank() == 0:
            total.update(f"{name}: {_fingerprint(whole)}\n".encode())
    dist.barrier()  # a rank that left now would take away what it has sent
    return total.hexdigest()[:32] if dist.get_rank() == 0 else ""


_TABLES = "embedding_bags."


class _Layout(NamedTuple):
    """Where the parts of a sharded tensor are: (rank, offsets, sizes) of each. None: every rank has the whole value."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    parts: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...] | None


def _layout(value: Any) -> _Layout:
    if not isinstance(value, ShardedTensor):
        return _Layout((), None, None)
    parts = []
    for shard in value.metadata().shards_metadata:
        assert shard.placement is not None
        parts.append((shard.placement.rank() or 0, tuple(shard.shard_offsets), tuple(shard.shard_sizes)))
    return _Layout(tuple(value.size()), value.dtype, tuple(sorted(parts, key=lambda part: part[1])))


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


def _gather(value: Any, layout: _Layout) -> Any:
    """The whole value on rank 0; parts travel one by one in an order that all ranks know."""
    if layout.parts is None:
        return value
    rank = dist.get_rank()
    mine = (
        {tuple(shard.metadata.shard_offsets): shard.tensor.detach() for shard in value.local_shards()}
        if value is not None
        else {}
    )
    whole = torch.empty(layout.shape, dtype=layout.dtype) if rank == 0 else None
    for owner, offsets, sizes in layout.parts:
        if owner == rank != 0:
            dist.send(mine[offsets].contiguous(), dst=0)
        if whole is None:
            continue
        if owner == 0:
            part = mine[offsets]
        else:
            part = torch.empty(sizes, dtype=layout.dtype, device="cuda" if dist.get_backend() == "nccl" else "cpu")
            dist.recv(part, src=owner)
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = part
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
