"""Which rows differ between two checkpoints, table by table. Rows that both read from the same place are not read.

It must not know models, ranks or threads, and must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from incremental_ckpt.repository import Link, Repository
from incremental_ckpt.repository.read import chain_ranks
from incremental_ckpt.repository.records import MIB, SpanReader, TableRecords

What = Literal["same", "changed", "added", "removed", "other shape"]

_WINDOW_BYTES = 8 * MIB
_KEPT = 64 * MIB


@dataclass(frozen=True)
class TableDifference:
    """How one table differs.

    Attributes:
        what: ``other shape``: rows, columns or fields differ, so that rows cannot be compared.
        rows: of the table in the second checkpoint (the first, if it is only there).
        changed: rows in which any field differs, in any bit.
        fields: the same for each field by itself.
    """

    table: str
    what: What
    rows: int
    changed: int
    fields: Mapping[str, int]


def compare(repository: Repository, first: int, second: int) -> list[TableDifference]:
    """The tables of two checkpoints, by name.

    Raises:
        NotFoundError: no such checkpoint.
        CorruptionError: something of them is damaged.
    """
    return repository.read_along(lambda *chains: _compare(repository, chains), first, second)


def _compare(repository: Repository, links: Sequence[Sequence[Link]]) -> list[TableDifference]:
    reader = SpanReader(repository, _KEPT)
    chains = [chain_ranks(repository, chain) for chain in links]
    names = [{entries.shard.table for rank in chain[-1] for entries in rank.shards} for chain in chains]
    found = []
    for name in sorted(names[0] | names[1]):
        a, b = (TableRecords(reader, chains[i], name) if name in names[i] else None for i in (0, 1))
        found.append(_compare_table(name, a, b))
    return found


def _compare_table(name: str, a: TableRecords | None, b: TableRecords | None) -> TableDifference:
    present = b or a
    assert present is not None
    rows = present.shards[0].table_rows
    if a is None or b is None:
        return TableDifference(name, "added" if a is None else "removed", rows, rows, {})
    fields = [b.field(field.name) for field in b.shards[0].fields]
    if a.shards[0].table_rows != rows or [a.field(field.name) for field in a.shards[0].fields] != fields:
        return TableDifference(name, "other shape", rows, rows, {})
    changed = np.zeros(rows, dtype=np.bool_)
    counts = {}
    for field in fields:
        counts[field.name] = 0
        step = max(1, _WINDOW_BYTES // field.row_bytes)
        for begin in range(0, rows, step):
            window = range(begin, min(begin + step, rows))
            if np.array_equal(a.sources(field.name, window), b.sources(field.name, window)):
                continue
            differ = (a.values(field.name, window) != b.values(field.name, window)).any(axis=1)
            counts[field.name] += int(np.count_nonzero(differ))
            changed[window.start : window.stop] |= differ
    total = int(np.count_nonzero(changed))
    return TableDifference(name, "changed" if total else "same", rows, total, counts)
