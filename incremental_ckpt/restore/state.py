"""The named state beside the rows: nested containers with tensors of their own memory.

It must not know tables, nor whom the state belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import RankManifest, State
from incremental_ckpt.format.rank_facts import SHARED
from incremental_ckpt.format.tree import from_tree
from incremental_ckpt.repository import Repository
from incremental_ckpt.repository.read import read_span
from incremental_ckpt.restore.found import Found
from incremental_ckpt.sharing import united
from incremental_ckpt.snapshot import torch_value


def load_state(repository: Repository, found: Found) -> dict[str, Any]:
    """The named state of this rank, with what all ranks share put back in place: nested containers with CPU tensors of
    their own memory.

    Where another number of ranks saved, ``found.state[0]`` is the rank whose own state this one takes over. Where this
    rank held other shards, counters of optimizers come from all ranks.
    """
    own = found.state[0]
    state = {s.name: _load_one(repository, own, s) for s in own.state}
    portions = [state[SHARED]] if SHARED in state else []
    for other in found.state[1:]:
        for each in other.state:
            if each.name == SHARED:
                portions.append(_load_one(repository, other, each))
            elif each.name == "fused" and not found.same_shards:
                state["fused"] = [*state["fused"], *_load_one(repository, other, each)]
            elif each.name == "optimizer" and not found.same_shards:
                _add_missing(state["optimizer"], _load_one(repository, other, each))
    return united(state, portions)


def _add_missing(optimizers: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Steps of parameters of which this rank's predecessor held no rows."""
    for name, value in others.items():
        if "state" in value and "state" in optimizers.get(name, {}):
            optimizers[name]["state"] = {**value["state"], **optimizers[name]["state"]}


def _load_one(repository: Repository, source: RankManifest, state: State) -> Any:
    tensors: list[torch.Tensor] = []
    for stored in state.tensors:
        memory = torch.empty(stored.at.size, dtype=torch.uint8)
        if stored.at.size:
            read_span(repository, source, stored.at, memory.numpy().data)
        dtype = getattr(torch, stored.dtype)
        tensors.append(
            memory.view(dtype).view(stored.shape) if stored.at.size else torch.empty(stored.shape, dtype=dtype)
        )
    key = layout.rank_manifest_key(source.seq, source.attempt, source.rank)
    return from_tree(state.tree, tensors, key=key, make=torch_value)
