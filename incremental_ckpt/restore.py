"""Replay a chain into live tables: every row once, from the newest checkpoint that carries it, whatever the sharding
was.

It must not know trackers, policies or which model the tables belong to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from incremental_ckpt.codecs import codec_named
from incremental_ckpt.errors import CorruptionError, MismatchError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import RankManifest, State
from incremental_ckpt.format.replay import Read
from incremental_ckpt.format.tree import from_tree
from incremental_ckpt.model import Field, Shard, Table
from incremental_ckpt.repository import Link, Repository
from incremental_ckpt.repository.read import TableChain, read_span


@dataclass(frozen=True)
class Found:
    """A chain whose structure is verified: every manifest, every rank manifest, and the size of every pack.

    Attributes:
        links: base first.
        tables: per link the rank manifests that tables are read from.
        state: the rank manifests of the newest checkpoint.
    """

    links: Sequence[Link]
    tables: Sequence[Sequence[RankManifest]]
    state: Sequence[RankManifest]

    @property
    def bytes(self) -> int:
        return sum(p.size for link in self.tables for rank in link for p in rank.packs)

    def shards(self) -> dict[str, list[Shard]]:
        """The tables of the newest checkpoint by name."""
        found: dict[str, list[Shard]] = {}
        for rank in self.tables[-1]:
            for entries in rank.shards:
                found.setdefault(entries.shard.table, []).append(entries.shard)
        return found


def find(repository: Repository, links: Sequence[Link]) -> Found:
    """Verify the structure of a chain before anything is changed.

    Raises:
        CorruptionError: naming the object.
        NotFoundError: a rank manifest is missing.
    """
    tables = [repository.rank_manifests(link.tables) for link in links]
    newest = links[-1]
    state = tables[-1] if newest.tables is newest.manifest else repository.rank_manifests(newest.manifest)
    sizes: dict[str, int] = {}
    for rank in {id(r): r for ranks in (*tables, state) for r in ranks}.values():
        if rank.rank == 0 or not sizes:
            sizes |= {o.key: o.size for o in repository.store.list(layout.attempt_prefix(rank.seq, rank.attempt))}
        for pack in rank.packs:
            if sizes.get(pack.key) != pack.size:
                raise CorruptionError(
                    f"{pack.key} in {repository.store.url} "
                    + (f"has {sizes[pack.key]} bytes instead of {pack.size}" if pack.key in sizes else "is missing")
                    + ". Restore it from a copy, or resume an ancestor",
                    key=pack.key, expected=f"{pack.size} bytes", found=f"{sizes.get(pack.key, 'nothing')}",
                )  # fmt: skip
    return Found(links, tables, state)


def compare_tables(found: Mapping[str, Sequence[Shard]], live: Sequence[Table], *, strict: bool) -> list[str]:
    """What differs between the tables of a checkpoint and of a model, a line each.

    Raises:
        MismatchError: shapes or dtypes differ, or (strict) the names do.
    """
    ours = {t.shard.table: t.shard for t in live}
    names, fatal = [], []
    for table in sorted(ours.keys() - found.keys()):
        names.append(f"table {table} ({_shape(ours[table])}) is in the model and not in the checkpoint")
    for table in sorted(found.keys() - ours.keys()):
        names.append(f"table {table} ({_shape(found[table][0])}) is in the checkpoint and not in the model")
    for table in sorted(ours.keys() & found.keys()):
        a, b = ours[table], found[table][0]
        if (a.table_rows, a.table_cols) != (b.table_rows, b.table_cols):
            fatal.append(f"table {table} is {_shape(a)} in the model and {_shape(b)} in the checkpoint")
            continue
        mine, theirs = {f.name: f for f in a.fields}, {f.name: f for f in b.fields}
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                fatal.append(
                    f"table {table}: field {name} is {_field(mine.get(name))} in the model and "
                    f"{_field(theirs.get(name))} in the checkpoint"
                )
    if fatal or (strict and names):
        raise MismatchError(
            "model and checkpoint differ: "
            + "; ".join([*fatal, *names])
            + ("" if fatal else ". strict=False loads what both have")
        )
    return names


def _shape(shard: Shard) -> str:
    return f"{shard.table_rows} x {shard.table_cols}"


def _field(field: Field | None) -> str:
    return "absent" if field is None else f"{field.dtype}[{field.width}]"


def load_tables(
    repository: Repository,
    found: Found,
    tables: Sequence[Table],
    *,
    threads: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Read all rows of the given tables into their live tensors.

    Raises:
        CorruptionError: a checksum does not fit. The tensors are then undefined, and to be loaded again.
        NotFoundError: a pack is missing.
    """
    buffers = threading.local()

    def load(table: Table, chain: TableChain, field: Field, read: Read) -> int:
        live = table.tensors[field.name].detach()
        raw = live.view(torch.uint8).numpy() if live.device.type == "cpu" and live.numel() else None
        start = table.shard.row_start
        rows = (
            slice(read.rows.start - start, read.rows.stop - start)
            if isinstance(read.rows, slice)
            else read.rows - start
        )
        whole = (
            isinstance(read.positions, slice)
            and isinstance(rows, slice)
            and read.entry.at.size == (rows.stop - rows.start) * read.entry.record
        )
        if whole and raw is not None and read.entry.codec == "raw" and raw.flags.c_contiguous:
            chain.records(read, raw[rows].reshape(-1).data)
            return read.entry.at.size
        if getattr(buffers, "memory", None) is None or len(buffers.memory) < read.entry.at.size:
            buffers.memory = bytearray(read.entry.at.size)
        records = chain.records(read, memoryview(buffers.memory)[: read.entry.at.size])[read.positions]
        if raw is not None and read.entry.codec == "raw":
            raw[rows] = records
        else:
            values = torch.from_numpy(np.array(_decoded(records, read.entry.codec, field)))
            if read.entry.codec == "raw":
                values = values.view(live.dtype).view(-1, field.width)
            at = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else torch.from_numpy(rows)
            live.index_copy_(0, at.to(live.device), values.to(live.device, live.dtype))
        return read.entry.at.size

    with ThreadPoolExecutor(threads, "ickpt-read") as pool:
        jobs = []
        for table in tables:
            shard = table.shard
            chain = TableChain(repository, found.tables, shard.table)
            for field in shard.fields:
                rows = range(shard.row_start, shard.row_start + shard.rows)
                for read in chain.plan(field.name, rows, range(shard.col_start, shard.col_start + shard.cols)):
                    jobs.append(pool.submit(load, table, chain, field, read))
        try:
            for job in jobs:
                nbytes = job.result()
                if progress is not None:
                    progress(nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _decoded(records: np.ndarray, codec: str, field: Field) -> np.ndarray:
    return records if codec == "raw" else codec_named(codec).decode(records, field)


def load_state(repository: Repository, found: Found, rank: int) -> dict[str, Any]:
    """The named state of a rank: nested containers with CPU tensors of their own memory."""
    ranks = {r.rank: r for r in found.state}
    source = ranks.get(rank, found.state[0])
    return {state.name: _load_one(repository, source, state) for state in source.state}


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
    return from_tree(state.tree, tensors, key=key, make=_make)


def _make(tag: str, value: Any) -> object:
    if tag == "$size":
        return torch.Size(value)
    if tag == "$device":
        return torch.device(value)
    dtype = getattr(torch, value, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no such dtype: {value!r}")  # noqa: TRY004 - a wrong value of the right type
    return dtype
