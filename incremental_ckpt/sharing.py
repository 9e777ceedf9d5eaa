"""What all ranks hold alike is written once, spread over the first few ranks; what it is put back from is their union.

It must not know models or stores: it takes trees of state apart by name, and slices of rows by number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from incremental_ckpt.format.rank_facts import SHARED
from incremental_ckpt.model import Table
from incremental_ckpt.snapshot import Rows

MAX_WRITERS = 8
"""A resume of one rank reads the manifests of all ranks that hold shared state: few, however many ranks there are."""


def writers(world_size: int) -> int:
    return min(world_size, MAX_WRITERS)


def owners(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Which rank writes which of the replicated tensors; the same on every rank, about equal in bytes."""
    loads = [0] * writers(world_size)
    chosen = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = loads.index(min(loads))
        chosen[name] = rank
        loads[rank] += sizes[name] + 1
    return chosen


def own_part(state: Mapping[str, Any], replicated: Collection[str], rank: int, world_size: int) -> dict[str, Any]:
    """The state that this rank writes: all that is its own, and under ``shared`` its portion of what is replicated."""
    dense: Mapping[str, Any] = state["dense"]
    sizes = {n: t.nbytes for n, t in dense.items() if n in replicated and isinstance(t, torch.Tensor)}
    owner = owners(sizes | dict.fromkeys(sorted(set(replicated) - sizes.keys()), 0), world_size)
    optimizers: dict[str, Any] = {}
    portion: dict[str, Any] = {}
    for name, optimizer in state["optimizer"].items():
        if "state" not in optimizer:
            optimizers[name] = optimizer
            continue
        own = {p: s for p, s in optimizer["state"].items() if p not in owner}
        optimizers[name] = {**optimizer, "state": own}
        portion[name] = {p: s for p, s in optimizer["state"].items() if owner.get(p) == rank}
    part = {
        **state,
        "dense": {n: t for n, t in dense.items() if n not in owner},
        "optimizer": optimizers,
    }
    if rank < writers(world_size):
        part[SHARED] = {"dense": {n: t for n, t in dense.items() if owner.get(n) == rank}, "optimizer": portion}
    return part


def united(own: Mapping[str, Any], portions: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A rank's state with the portions of what is replicated put back in place."""
    whole = {name: value for name, value in own.items() if name != SHARED}
    whole["dense"] = dict(own["dense"])
    whole["optimizer"] = {
        name: {**value, "state": dict(value["state"])} if "state" in value else value
        for name, value in own["optimizer"].items()
    }
    for portion in portions:
        whole["dense"] |= portion["dense"]
        for name, states in portion["optimizer"].items():
            if "state" in whole["optimizer"].get(name, {}):
                whole["optimizer"][name]["state"] |= states
    return whole


def own_rows(table: Table, rows: Rows, rank: int, world_size: int) -> Rows:
    """The rows that this rank writes: all of its own shards, a slice of replicated ones."""
    if not table.replicated or world_size == 1:
        return rows
    count = writers(world_size)
    begin, end = (table.shard.rows * r // count if r <= count else table.shard.rows for r in (rank, rank + 1))
    if rank >= count:
        begin = end = table.shard.rows
    if rows is None or isinstance(rows, range):
        return range(begin, end)
    return rows[int(torch.searchsorted(rows, begin)) : int(torch.searchsorted(rows, end))]
