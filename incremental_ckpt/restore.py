"""Replay a chain into live tables: every row once, from the newest checkpoint that carries it, whatever the sharding
was.

It must not know trackers, policies or which model the tables belong to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from incremental_ckpt.codecs import codec_named
from incremental_ckpt.errors import CorruptionError, MismatchError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Manifest, Place, RankManifest, State, Wanted
from incremental_ckpt.format.rank_manifest import SHARED
from incremental_ckpt.format.replay import Read
from incremental_ckpt.format.tree import from_tree
from incremental_ckpt.model import Field, Shard, Table
from incremental_ckpt.repository import Link, Repository
from incremental_ckpt.repository.read import ChainShards, TableChain, field_of, read_span
from incremental_ckpt.sharing import united


@dataclass(frozen=True)
class Found:
    """A chain whose structure is verified: every manifest, every rank manifest that is needed, and the size of their
    packs.

    Attributes:
        links: base first.
        tables: per link the rank manifests that tables are read from.
        state: the rank manifests of the newest checkpoint that this rank's state is read from, its own first.
        same_ranks: it was saved by as many ranks as there are now.
        same_shards: this rank held the same shards then.
    """

    links: Sequence[Link]
    tables: Sequence[Sequence[RankManifest]]
    state: Sequence[RankManifest]
    same_ranks: bool
    same_shards: bool

    @property
    def bytes(self) -> int:
        """Size of the packs."""
        return sum(p.size for link in self.tables for rank in link for p in rank.packs)

    def shards(self) -> dict[str, list[Shard]]:
        """The tables of the newest checkpoint by name."""
        found: dict[str, list[Shard]] = {}
        for rank in self.tables[-1]:
            for entries in rank.shards:
                found.setdefault(entries.shard.table, []).append(entries.shard)
        return found


def find(
    repository: Repository, links: Sequence[Link], live: Sequence[Table], *, rank: int = 0, world_size: int = 1
) -> Found:
    """Verify the structure of what a rank needs of a chain, before anything is changed.

    Where the sharding is the same, that is its own manifests and those that hold what all ranks share; else all.

    Args:
        live: the tables of this rank.

    Raises:
        CorruptionError: naming the object.
        NotFoundError: a rank manifest is missing.
    """
    found = [_chosen(repository, link.tables, live, rank, world_size) for link in links]
    chosen = [manifests for manifests, _ in found]
    newest = links[-1].manifest
    same_ranks = len(newest.ranks) == world_size
    same_tables = links[-1].tables is newest
    state, same_shards = found[-1] if same_tables else _chosen(repository, newest, live, rank, world_size)
    own = rank % len(newest.ranks)
    state = sorted(state, key=lambda r: (r.rank != own, r.rank))
    for each in {id(r): r for ranks in (*chosen, state) for r in ranks}.values():
        _check_packs(repository, each)
    return Found(links, chosen, state, same_ranks, same_shards)


def _chosen(
    repository: Repository, manifest: Manifest, live: Sequence[Table], rank: int, world_size: int
) -> tuple[list[RankManifest], bool]:
    """The rank manifests of one checkpoint that hold this rank's shards, and whether the rank held the same then."""
    refs = manifest.ranks
    if manifest.of is None and len(refs) == world_size:
        own = repository.rank_manifest(refs[rank])
        if _places(s.shard for s in own.shards) == _places(t.shard for t in live):
            others = (ref for r, ref in enumerate(refs) if ref.shared and r != rank)
            return [own, *(repository.rank_manifest(ref, lambda place: place.replicated) for ref in others)], True
    return repository.rank_manifests(manifest, _overlapping(live)), False


def _overlapping(live: Sequence[Table]) -> Wanted:
    """Shards with rows and columns of these tables; of tables that are not among them, or without rows here, all: those
    are only compared."""
    by_table: dict[str, list[Shard]] = {}
    for table in live:
        by_table.setdefault(table.shard.table, []).append(table.shard)

    def wanted(place: Place) -> bool:
        mine = by_table.get(place.table)
        return mine is None or any(
            not s.rows
            or (place.row_start < s.row_start + s.rows and s.row_start < place.row_start + place.rows
            and place.col_start < s.col_start + s.cols and s.col_start < place.col_start + place.cols)
            for s in mine
        )  # fmt: skip

    return wanted


def _places(shards: Iterable[Shard]) -> set[tuple[str, int, int, int, int]]:
    return {(s.table, s.row_start, s.rows, s.col_start, s.cols) for s in shards}


def _check_packs(repository: Repository, found: RankManifest) -> None:
    prefix = layout.rank_manifest_key(found.seq, found.attempt, found.rank).removesuffix(".json")
    sizes = {o.key: o.size for o in repository.store.list(prefix)} if found.packs else {}
    for pack in found.packs:
        if sizes.get(pack.key) != pack.size:
            raise CorruptionError(
                f"{pack.key} in {repository.store.url} "
                + (f"has {sizes[pack.key]} bytes instead of {pack.size}" if pack.key in sizes else "is missing")
                + ". Restore it from a copy, or resume an ancestor",
                key=pack.key, expected=f"{pack.size} bytes", found=f"{sizes.get(pack.key, 'nothing')}",
            )  # fmt: skip


def compare_tables(
    found: Mapping[str, Sequence[Shard]], live: Sequence[Table], *, strict: bool, elsewhere: Collection[str] = ()
) -> list[str]:
    """What differs between the tables of a checkpoint and of a model, a line each.

    Args:
        elsewhere: tables of the model that other ranks hold, and compare.

    Raises:
        MismatchError: shapes or dtypes differ, or (strict) the names do.
    """
    ours = {t.shard.table: t.shard for t in live}
    names, fatal = [], []
    for table in sorted(ours.keys() - found.keys()):
        names.append(f"table {table} ({_shape(ours[table])}) is in the model and not in the checkpoint")
    for table in sorted(found.keys() - ours.keys() - set(elsewhere)):
        names.append(f"table {table} ({_shape(found[table][0])}) is in the checkpoint and not in the model")
    for table in sorted(ours.keys() & found.keys()):
        a, b = ours[table], found[table][0]
        if (a.table_rows, a.table_cols) != (b.table_rows, b.table_cols):
            fatal.append(f"table {table} is {_shape(a)} in the model and {_shape(b)} in the checkpoint")
            continue
        mine, theirs = {f.name: f for f in a.fields}, {f.name: f for f in b.fields}
        for name in sorted(mine.keys() | theirs.keys()):
            if not _same(mine.get(name), a, theirs.get(name), b):
                kinds = names if name not in mine or name not in theirs else fatal
                kinds.append(
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


def _same(mine: Field | None, my_shard: Shard, theirs: Field | None, their_shard: Shard) -> bool:
    if mine is None or theirs is None or mine.dtype != theirs.dtype:
        return mine is theirs
    # A field with the table's columns is as wide as its shard, however the columns are cut.
    return mine.width == theirs.width or (mine.width == my_shard.cols and theirs.width == their_shard.cols)


def _shape(shard: Shard) -> str:
    return f"{shard.table_rows} x {shard.table_cols}"


def _field(field: Field | None) -> str:
    return "absent" if field is None else f"{field.dtype}[{field.width}]"


MEAN = "the mean over the column shards that there were, by shared columns"
COPY = "in every column shard that of all columns"


class _Target:
    """One field of one live table, into which records are put."""

    def __init__(self, table: Table, field: Field) -> None:
        self._shard = table.shard
        self._field = field
        self._live = table.tensors[field.name].detach()
        on_cpu = self._live.device.type == "cpu" and self._live.numel() > 0
        self._bytes = self._live.view(torch.uint8).numpy() if on_cpu else None
        self._itemsize = self._live.element_size()

    def memory_for(self, read: Read) -> memoryview | None:
        """Live memory that the whole entry can be read into as it is."""
        rows = self._local(read)
        whole = (
            isinstance(read.positions, slice)
            and isinstance(rows, slice)
            and read.entry.at.size == (rows.stop - rows.start) * read.entry.record
        )
        as_is = read.entry.codec == "raw" and self._columns(read) is None and self._share(read) is None
        if not whole or not as_is or self._bytes is None:
            return None
        target = self._bytes[rows]
        return target.reshape(-1).data if target.flags.c_contiguous else None

    def put(self, read: Read, records: np.ndarray) -> None:
        rows, columns, share = self._local(read), self._columns(read), self._share(read)
        if self._bytes is not None and read.entry.codec == "raw" and share is None:
            if columns is None:
                self._bytes[rows] = records
            else:
                source, target = (slice(c.start * self._itemsize, c.stop * self._itemsize) for c in columns)
                self._bytes[rows, target] = records[:, source]
            return
        stored = field_of(read.shard_entries.shard, self._field.name) or self._field
        values = torch.from_numpy(np.array(_decoded(records, read.entry.codec, stored)))
        if read.entry.codec == "raw":
            values = values.view(self._live.dtype).view(-1, stored.width)
        live = self._live
        if columns is not None:
            values, live = values[:, columns[0]], live[:, columns[1]]
        at = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else torch.from_numpy(rows)
        at, values = at.to(live.device), values.to(live.device, live.dtype)
        if share is None:
            live.index_copy_(0, at, values)
        else:
            live.index_add_(0, at, values, alpha=share)

    def begin(self, reads: Sequence[Read]) -> str | None:
        """Get ready for these reads.

        Returns:
            The rule by which row-wise state comes from shards with other columns; None: it comes as it was.
        """
        if any(self._share(read) is not None for read in reads):
            self._live.zero_()
            return MEAN
        return COPY if any(self._is_copy(read) for read in reads) else None

    def _is_copy(self, read: Read) -> bool:
        stored = read.shard_entries.shard
        return not self._has_columns(read) and stored.cols != self._shard.cols

    def _local(self, read: Read) -> slice | np.ndarray:
        start = self._shard.row_start
        if isinstance(read.rows, slice):
            return slice(read.rows.start - start, read.rows.stop - start)
        rows: np.ndarray = read.rows - start
        return rows

    def _has_columns(self, read: Read) -> bool:
        """Whether the field has the table's columns. Row-wise state has one value for all columns of a shard."""
        stored = read.shard_entries.shard
        spec = field_of(stored, self._field.name)
        return spec is not None and spec.width == stored.cols and self._field.width == self._shard.cols

    def _columns(self, read: Read) -> tuple[slice, slice] | None:
        """Which columns of a record go to which of the live ones; None: all to all."""
        if not self._has_columns(read):
            return None
        stored = read.shard_entries.shard
        source = slice(read.cols.start - stored.col_start, read.cols.stop - stored.col_start)
        target = slice(read.cols.start - self._shard.col_start, read.cols.stop - self._shard.col_start)
        whole = (source.start, source.stop) == (0, stored.cols) and (target.start, target.stop) == (0, self._shard.cols)
        return None if whole else (source, target)

    def _share(self, read: Read) -> float | None:
        """The weight of row-wise state that comes from several column shards: the mean by shared columns. For row-wise
        Adagrad, whose state sums the mean square of the gradient over the columns, that is the unsharded value."""
        if self._has_columns(read) or len(read.cols) == self._shard.cols:
            return None
        return len(read.cols) / self._shard.cols


def load_tables(
    repository: Repository,
    found: Found,
    tables: Sequence[Table],
    *,
    threads: int,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Read all rows of the given tables into their live tensors.

    Returns:
        Where row-wise optimizer state was put back by a rule, since columns were sharded otherwise; a line each.

    Raises:
        CorruptionError: a checksum does not fit. The tensors are then undefined, and to be loaded again.
        NotFoundError: a pack is missing.
    """
    buffers = threading.local()
    rules: list[str] = []

    def load(target: _Target, chain: TableChain, read: Read) -> int:
        size = read.entry.at.size
        if (memory := target.memory_for(read)) is not None:
            chain.records(read, memory)
            return size
        if getattr(buffers, "memory", None) is None or len(buffers.memory) < size:
            buffers.memory = bytearray(size)
        target.put(read, chain.records(read, memoryview(buffers.memory)[:size])[read.positions])
        return size

    shards = ChainShards(found.tables)
    with ThreadPoolExecutor(threads, "ickpt-read") as pool:
        jobs = []
        for table in tables:
            shard = table.shard
            chain = TableChain(repository, shards, shard.table)
            stored = {field.name for part in found.shards().get(shard.table, ()) for field in part.fields}
            for field in shard.fields:
                if field.name not in stored:
                    continue  # not strict: it stays as it is
                rows = range(shard.row_start, shard.row_start + shard.rows)
                reads = chain.plan(field.name, rows, range(shard.col_start, shard.col_start + shard.cols))
                target = _Target(table, field)
                rule = target.begin(reads)
                if rule is not None:
                    rules.append(f"table {shard.table}: {field.name} is {rule}")
                # Several parts of a mean meet in one row: their sum must not depend on the order of threads.
                jobs += _submitted(pool, load, target, chain, reads, parallel=rule != MEAN)
        try:
            for job in jobs:
                nbytes = job.result()
                if progress is not None:
                    progress(nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return rules


def _submitted(
    pool: ThreadPoolExecutor,
    load: Callable[[_Target, TableChain, Read], int],
    target: _Target,
    chain: TableChain,
    reads: Sequence[Read],
    *,
    parallel: bool,
) -> list[Future[int]]:
    if parallel:
        return [pool.submit(load, target, chain, read) for read in reads]
    return [pool.submit(lambda: sum(load(target, chain, read) for read in reads))]


def _decoded(records: np.ndarray, codec: str, field: Field) -> np.ndarray:
    return records if codec == "raw" else codec_named(codec).decode(records, field)


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
