"""What a checkpoint holds, by name and independent of how many ranks saved it; rows are read when they are asked for.

It must not know any format of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from incremental_ckpt.arguments import Progress
from incremental_ckpt.format.manifest import RankManifest
from incremental_ckpt.model import WEIGHT, Field
from incremental_ckpt.repository import Link, Repository
from incremental_ckpt.repository.read import chain_ranks
from incremental_ckpt.repository.records import MIB, SpanReader, TableRecords
from incremental_ckpt.restore import Found, load_state

CHUNK_BYTES = 32 * MIB
_KEPT = 128 * MIB


@dataclass
class Meter:
    """Bytes of rows, out of ``total``, that were read so far."""

    progress: Progress
    total: int = 0
    done: int = 0

    def count(self, nbytes: int) -> None:
        self.done += nbytes
        self.progress(self.done, self.total)


@dataclass(frozen=True)
class Rows:
    """One field of one table, which is read range by range."""

    repository: Repository
    records: TableRecords
    table: str
    field: Field
    count: int
    meter: Meter | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.count, self.field.width

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.field.dtype)
        return found

    @property
    def nbytes(self) -> int:
        return self.count * self.field.row_bytes

    def chunks(self) -> list[range]:
        """All rows in ranges of about CHUNK_BYTES."""
        step = max(1, CHUNK_BYTES // self.field.row_bytes)
        return [range(begin, min(begin + step, self.count)) for begin in range(0, self.count, step)]

    def read(self, rows: range) -> torch.Tensor:
        """``[rows, width]`` in the field's dtype, decoded."""
        if not rows:
            return torch.empty((0, self.field.width), dtype=self.dtype)
        raw = torch.from_numpy(self.records.values(self.field.name, rows).copy())
        if self.meter is not None:
            self.meter.count(raw.numel())
        return raw.view(self.dtype).view(len(rows), self.field.width)

    def read_all(self) -> torch.Tensor:
        found = torch.empty(self.shape, dtype=self.dtype)
        for rows in self.chunks():
            found[rows.start : rows.stop] = self.read(rows)
        return found


@dataclass(frozen=True)
class Content:
    """A checkpoint by name.

    Attributes:
        tables: the weights of tables, under their names in the unsharded module's ``state_dict()``.
        dense: everything else of the model: tensors, and what modules gave as extra state.
        optimizer: None, or ``tables`` (their names), ``rows`` (by table and field, a Rows), ``dense`` (by optimizer)
            and ``fused`` (counters).
    """

    step: int
    tables: Mapping[str, Rows]
    dense: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None


def gather(
    repository: Repository, links: Sequence[Link], *, optimizer: bool, progress: Progress | None = None
) -> Content:
    """
    Args:
        progress: told of the bytes of rows, as they are read.
    """
    ranks = chain_ranks(repository, links)
    names = sorted({entries.shard.table for rank in ranks[-1] for entries in rank.shards})
    reader = SpanReader(repository, _KEPT)
    meter = None if progress is None else Meter(progress)
    weights, rows = dict[str, Rows](), dict[str, dict[str, Rows]]()
    for name in names:
        records = TableRecords(reader, ranks, name)
        count = records.shards[0].table_rows
        fields = [records.field(f.name) for f in records.shards[0].fields]
        found = {f.name: Rows(repository, records, name, f, count, meter) for f in fields}
        weights[f"{name}.{WEIGHT}"] = found.pop(WEIGHT)
        rows[name] = found
    manifest = links[-1].manifest
    own = ranks[-1] if links[-1].tables is manifest else repository.rank_manifests(manifest)
    state = _united(repository, links, own)
    whole = {"tables": names, "rows": rows, "dense": state["optimizer"], "fused": state["fused"]} if optimizer else None
    if meter is not None:
        read = [*weights.values(), *(f for fields in rows.values() for f in fields.values() if optimizer)]
        meter.total = sum(each.nbytes for each in read)
    return Content(manifest.step, weights, state["dense"], whole)


def _united(repository: Repository, links: Sequence[Link], ranks: Sequence[RankManifest]) -> dict[str, Any]:
    """The state of all ranks by name. Where several have something under one name, the first one's is taken."""
    whole: dict[str, Any] = {"dense": {}, "optimizer": {}, "fused": []}
    for rank in ranks:
        state = load_state(repository, Found(links, (), (rank,), same_ranks=True, same_shards=True))
        whole["dense"] = {**state["dense"], **whole["dense"]}
        for name, value in state.get("optimizer", {}).items():
            known = whole["optimizer"].setdefault(name, value)
            if "state" in known and "state" in value:
                whole["optimizer"][name] = {**known, "state": {**value["state"], **known["state"]}}
        whole["fused"] += state.get("fused", [])
    return whole
