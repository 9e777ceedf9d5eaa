"""Chains made by hand: any shards, rows and codecs, and what each checkpoint must read as.

It must not know compaction or pruning.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from incremental_ckpt import Repository
from incremental_ckpt.codecs import codec_named
from incremental_ckpt.format.layout import new_id
from incremental_ckpt.format.manifest import Lineage, Manifest, Totals
from incremental_ckpt.model import WEIGHT, Field, Kind, Shard, Table
from incremental_ckpt.rank_writer import Attempt, RankWriter
from incremental_ckpt.snapshot import HostArena, Part, StateCopy, flatten_state
from incremental_ckpt.storage import MemoryStore, Store

JOB = "00000000000000a1"
Values = Mapping[tuple[str, str], bytes]


def shard(
    table: str, rows: int, cols: int, *, at: tuple[int, int] = (0, 0), part: tuple[int, int] | None = None,
    dtype: str = "float32", momentum: bool = True,
) -> Shard:  # fmt: skip
    """A shard of ``part`` rows and columns that begins ``at``; None: the whole table. Momentum is row-wise."""
    height, width = part or (rows, cols)
    fields = [Field(WEIGHT, dtype, width)] + ([Field("momentum1", "float32", 1)] if momentum else [])
    return Shard(table, rows, cols, at[0], height, at[1], width, tuple(fields))


def column_parts(table: str, rows: int, edges: Sequence[int], *, momentum: bool = True) -> list[Shard]:
    """Shards of all rows, whose columns are cut at the edges."""
    return [
        shard(table, rows, edges[-1], at=(0, a), part=(rows, b - a), momentum=momentum)
        for a, b in itertools.pairwise(edges)
    ]


def random_fields(of: Shard, count: int, seed: int) -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(seed)
    arrays = []
    for field in of.fields:
        numbers = draw.standard_normal((count, field.width)).astype(np.float32)
        if field.dtype == "bfloat16":
            numbers = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        elif field.dtype != "float32":
            numbers = numbers.astype(field.dtype)
        arrays.append(np.ascontiguousarray(numbers).view(np.uint8).reshape(count, -1))
    return tuple(arrays)


class Chain:
    """A repository that grows by hand-made checkpoints of one job."""

    def __init__(self, store: Store | None = None) -> None:
        self.repository = Repository(store if store is not None else MemoryStore())
        self.repository.create()
        self.seq = 0
        self.last: Manifest | None = None

    def save(
        self,
        ranks: Sequence[Sequence[tuple[Shard, np.ndarray | range]]],
        *,
        codec: str = "raw",
        kind: Kind | None = None,
        moves_parent: bool = True,
        metrics: Mapping[str, float] | None = None,
        replicated: bool = False,
        unheld: bool = False,
        state: bool = False,
    ) -> Manifest:
        """Commit the next number: for each rank its shards, and which local rows of each are carried.

        Args:
            kind: a delta (on the newest that moved the parent), unless it is the first.
            unheld: some values are such that only raw holds them.
            state: write state as well: tensors of each rank's own, no optimizers.
        """
        seq = self.seq = self.seq + 1
        kind = kind or ("base" if self.last is None else "delta")
        parent = None if kind == "base" or self.last is None else self.last.ref
        attempt = Attempt(
            seq=seq, attempt=new_id().replace("c", "d", 1), kind=kind, parent=parent,
            next_parent=None if moves_parent else parent, step=seq * 10, epoch=None, loss=1.0 / seq,
            metrics=metrics or {}, job=JOB, lineage=(Lineage(JOB, 1, 0),), environment={},
        )  # fmt: skip
        codecs = {WEIGHT: codec_named(codec), "optimizer": codec_named("raw")}
        ballots = []
        for number, members in enumerate(ranks):
            tables = [Table(s, {}, tracked=True, replicated=replicated) for s, _ in members]
            writer = RankWriter(self.repository, attempt, tables, codecs, rank=number, world_size=len(ranks))
            for index, (each, rows) in enumerate(members):
                if len(rows):
                    writer.add_rows([self._part(index, each, rows, unheld)])
            ballots.append(writer.vote(writer.add_state(self._state(number) if state else (), 1 << 20)))
        manifest = self.repository.commit(
            Manifest(
                seq=seq, step=attempt.step, epoch=None, loss=attempt.loss, metrics=dict(attempt.metrics), kind=kind,
                parent=parent, next_parent=attempt.next_parent, job=JOB, attempt=attempt.attempt,
                lineage=tuple(attempt.lineage), created=datetime(2026, 1, 1, tzinfo=UTC), world_size=len(ranks),
                ranks=tuple(b.ref for b in ballots),
                totals=Totals(
                    sum(b.rows for b in ballots), sum(b.table_rows for b in ballots), sum(b.bytes for b in ballots)
                ),
                environment={},
            )
        )  # fmt: skip
        if moves_parent:
            self.last = manifest
        return manifest

    @staticmethod
    def _state(rank: int) -> tuple[StateCopy, ...]:
        dense = {f"own.{rank}": torch.full((2,), float(rank)), "mean": torch.tensor(float(rank))}
        whole = {"dense": dense, "optimizer": {}, "fused": []}
        flat, arena = flatten_state(whole), HostArena(pinned=False)
        arena.reserve(flat.arena_bytes)
        return flat.copy(arena)

    def _part(self, index: int, of: Shard, rows: np.ndarray | range, unheld: bool) -> Part:
        fields = random_fields(of, len(rows), seed=self.seq * 1000 + index * 10 + of.row_start + of.col_start)
        if unheld:
            fields[0].view(np.float32)[::3, 0] = np.nan
        return Part(index, rows if isinstance(rows, range) else rows.astype(np.int64), fields)


def some_rows(of: Shard, share: float, seed: int) -> np.ndarray:
    return np.flatnonzero(np.random.default_rng(seed).random(of.rows) < share)


def values(repository: Repository, seq: int) -> Values:
    """Every field of every table as a checkpoint reads, decoded."""
    ranks = repository.rank_manifests(repository.links(seq)[-1].manifest)
    names = {(s.shard.table, f.name) for rank in ranks for s in rank.shards for f in s.shard.fields}
    return {name: repository.read_table(name[0], seq, field=name[1]).tobytes() for name in names}


def objects(store: Store) -> dict[str, int]:
    return {one.key: one.size for one in store.list()}


def copy_of(store: Store) -> MemoryStore:
    twin = MemoryStore()
    for one in store.list():
        twin.put(one.key, [bytes(store.get(one.key))])
    return twin


def equivalent_entries(repository: Repository, seq: int) -> list[Any]:
    """Entries of the equivalent base of a checkpoint."""
    manifest = repository.equivalent(repository.manifest(seq))
    assert manifest is not None
    return [e for rank in repository.rank_manifests(manifest) for s in rank.shards for e in s.entries]
