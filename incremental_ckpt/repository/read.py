"""Rows of a table out of a chain, by numpy alone.

It must not know models, ranks or threads, and must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from incremental_ckpt.codecs import decode_records
from incremental_ckpt.errors import CorruptionError, NotFoundError
from incremental_ckpt.format.manifest import RankManifest, ShardEntries, Span
from incremental_ckpt.format.pack import checksum
from incremental_ckpt.format.replay import MissingRows, Read, plan_reads
from incremental_ckpt.format.rowset import decode_rows
from incremental_ckpt.model import DTYPE_BYTES, Field, Shard

if TYPE_CHECKING:
    from incremental_ckpt.repository.chain import Link
    from incremental_ckpt.repository.core import Repository

_BELIEVED_BYTES = 64 << 20
"""A field of a table up to this size is not asked whether its bytes exist."""

_MOST_COMPRESSED = 64
"""No codec makes more of a byte: 2 bits for 64 are 32 times."""


def read_span(repository: Repository, ranks: RankManifest, span: Span, into: memoryview | None = None) -> memoryview:
    """The bytes of a span, verified.

    Raises:
        CorruptionError: naming the pack and the tensor.
        NotFoundError: the pack is missing.
    """
    key = ranks.packs[span.pack].key
    raw = repository.store.get(key, span.begin, span.end, into)
    found = checksum(raw)
    if found != span.checksum:
        raise CorruptionError(
            f"{key} in {repository.store.url}: tensor {span.tensor!r} (bytes {span.begin} to {span.end}) is not what "
            "was written. "
            "Restore the object from a copy, or resume an ancestor",
            key=key, expected=span.checksum, found=found,
        )  # fmt: skip
    return raw


class ChainShards:
    """All shards along a chain, found by table: looking for each table through all of them would take tables times
    shards.

    Args:
        ranks: per link the rank manifests that its tables are read from.
    """

    def __init__(self, ranks: Sequence[Sequence[RankManifest]]) -> None:
        self._links: list[dict[str, list[tuple[RankManifest, ShardEntries]]]] = []
        for link in ranks:
            by_table: dict[str, list[tuple[RankManifest, ShardEntries]]] = {}
            for rank in link:
                for shard in rank.shards:
                    by_table.setdefault(shard.shard.table, []).append((rank, shard))
            self._links.append(by_table)

    def of(self, table: str) -> list[list[tuple[RankManifest, ShardEntries]]]:
        """Per link the table's shards, each with its rank manifest."""
        return [by_table.get(table, []) for by_table in self._links]


class TableChain:
    """One table's shards along a chain, with its row sets read once."""

    def __init__(self, repository: Repository, shards: ChainShards, table: str) -> None:
        self._repository = repository
        self._owners: dict[int, RankManifest] = {}
        self._row_ids: dict[tuple[int, int], np.ndarray] = {}
        self.chain: list[list[ShardEntries]] = []
        for link in shards.of(table):
            self._owners |= {id(shard): rank for rank, shard in link}
            self.chain.append([shard for _, shard in link])

    def plan(self, field: str, rows: range, cols: range) -> list[Read]:
        """The reads that give every wanted row once. Raises CorruptionError where some row is in no checkpoint of the
        chain."""
        try:
            return list(plan_reads(self.chain, field, rows, cols, self.row_ids))
        except MissingRows as missing:
            table = next(s.shard.table for link in self.chain for s in link)
            raise CorruptionError(
                f"table {table}, field {field!r}: {missing} in {self._repository.store.url}; the chain does not cover "
                "it",
                key="", expected="every row", found=str(missing),
            ) from missing  # fmt: skip

    def row_ids(self, link: int, shard: ShardEntries, index: int) -> np.ndarray:
        del link
        if (known := self._row_ids.get((id(shard), index))) is None:
            row_set = shard.rowsets[index]
            rank = self._owners[id(shard)]
            raw = read_span(self._repository, rank, row_set.at)
            known = decode_rows(raw, count=row_set.count, rows=shard.shard.rows, key=rank.packs[row_set.at.pack].key)
            self._row_ids[id(shard), index] = known
        return known

    def records(self, read: Read, into: memoryview | None = None) -> np.ndarray:
        """All records of the entry that a read takes from, ``uint8 [rows of the entry, record]``."""
        raw = read_span(self._repository, self._owners[id(read.shard_entries)], read.entry.at, into)
        return np.frombuffer(raw, dtype=np.uint8).reshape(-1, read.entry.record)


def chain_ranks(repository: Repository, links: Sequence[Link]) -> list[list[RankManifest]]:
    """Per link the rank manifests that its tables are read from.

    Raises:
        CorruptionError: they declare a table that their packs cannot hold.
    """
    ranks = [repository.rank_manifests(link.tables) for link in links]
    check_backing(repository, ranks)
    return ranks


def check_backing(repository: Repository, ranks: Sequence[Sequence[RankManifest]]) -> None:
    """Make sure that large tables are backed by bytes: memory is reserved for what is declared, before it is read.

    Raises:
        CorruptionError: a table is declared that the packs cannot hold, or a pack has another size.
        NotFoundError: a pack is missing.
    """
    declared = dict[tuple[str, str], int]()
    for rank in ranks[-1]:
        for shard in (part.shard for part in rank.shards):
            for field in shard.fields:
                width = shard.table_cols if field.width == shard.cols else field.width
                size = shard.table_rows * width * DTYPE_BYTES[field.dtype]
                if size > _BELIEVED_BYTES:
                    declared[shard.table, field.name] = size
    if not declared:
        return
    held = {place: dict[tuple[str, int], int]() for place in declared}
    packs: dict[str, int] = {}
    for rank in (rank for link in ranks for rank in link):
        for part in rank.shards:
            for entry in part.entries:
                if (spans := held.get((part.shard.table, entry.field))) is not None:
                    pack = rank.packs[entry.at.pack]
                    spans[pack.key, entry.at.begin] = entry.at.size
                    packs[pack.key] = pack.size
    for (table, name), size in declared.items():
        found = sum(held[table, name].values())
        if size > found * _MOST_COMPRESSED:
            key = ranks[-1][0].key
            raise CorruptionError(
                f"{key} in {repository.store.url} declares table {table!r} with {size} bytes of {name!r}, and the "
                f"chain holds {found} bytes of records. Restore it from a copy, or resume an ancestor",
                key=key, expected=f"records of {size} bytes", found=f"{found} bytes",
            )  # fmt: skip
    folders = {key.rpartition("/")[0] + "/" for key in packs}
    sizes = {one.key: one.size for folder in sorted(folders) for one in repository.store.list(folder)}
    for key, size in packs.items():
        if key not in sizes:
            raise NotFoundError(f"no object {key} in {repository.store.url}", key=key)
        if sizes[key] != size:
            raise CorruptionError(
                f"{key} in {repository.store.url} has {sizes[key]} bytes instead of {size}. Restore it from a copy, or "
                "resume an ancestor",
                key=key, expected=f"{size} bytes", found=f"{sizes[key]} bytes",
            )  # fmt: skip


def field_of(shard: Shard, name: str) -> Field | None:
    return next((f for f in shard.fields if f.name == name), None)


def read_table(repository: Repository, links: Sequence[Link], name: str, rows: slice, field: str) -> np.ndarray:
    ranks = chain_ranks(repository, links)
    table = TableChain(repository, ChainShards(ranks), name)
    newest = table.chain[-1]
    if not newest:
        names = sorted({s.shard.table for r in ranks[-1] for s in r.shards})
        raise NotFoundError(
            f"checkpoint {links[-1].manifest.seq} has no table {name!r}; it has: {', '.join(names) or 'none'}"
        )
    spec = field_of(newest[0].shard, field)
    if spec is None:
        raise NotFoundError(
            f"table {name!r} has no field {field!r}; it has: {', '.join(f.name for f in newest[0].shard.fields)}"
        )
    wanted = range(newest[0].shard.table_rows)[rows]
    if wanted.step != 1:
        raise ValueError(f"read_table takes rows of step 1, not {rows}")
    cols = range(newest[0].shard.table_cols)
    has_columns = spec.width == newest[0].shard.cols
    values: np.ndarray | None = None
    for read in table.plan(field, wanted, cols):
        stored = read.shard_entries.shard
        records = table.records(read)[read.positions]
        decoded = decode_records(records, read.entry.codec, field_of(stored, field) or spec)
        if values is None:
            values = np.zeros((len(wanted), len(cols) if has_columns else spec.width), dtype=decoded.dtype)
        at = read.rows
        target = slice(at.start - wanted.start, at.stop - wanted.start) if isinstance(at, slice) else at - wanted.start
        if has_columns:
            part = decoded[:, read.cols.start - stored.col_start : read.cols.stop - stored.col_start]
            values[target, read.cols.start : read.cols.stop] = part
        elif len(read.cols) == len(cols):
            values[target] = decoded
        else:  # row-wise state of column shards: the mean, weighted by columns, as at a resume into one shard
            values[target] += decoded * decoded.dtype.type(len(read.cols) / len(cols))
    return values if values is not None else np.empty((0, spec.width), dtype=np.float32)
