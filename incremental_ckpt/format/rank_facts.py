"""What one rank wrote, as facts: its packs, and where in them the rows of each shard and each tensor of the state lie.

It must not know how that is written down, nor other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from incremental_ckpt.model import Shard

CODECS = frozenset({"raw", "fp16", "bf16", "int8", "int4", "int3", "int2"})
MAX_DIMENSIONS = 32

Vote = Literal["ok", "failed"]
SHARED = "shared"
"""The name of the state that every rank needs."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``begin:end`` of a pack (header included), their tensor's name there and their xxh3-64.

    ``pack`` is the pack's place in the rank manifest.
    """

    pack: int
    tensor: str
    begin: int
    end: int
    checksum: str

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack's key and size, and size and xxh3-64 of its header (with the 8 bytes before it)."""

    key: str
    size: int
    header_size: int
    header_checksum: str


@dataclass(frozen=True, slots=True)
class RowSet:
    """``count`` row ids, local to the shard, as a roaring bitmap at ``at``."""

    count: int
    at: Span


@dataclass(frozen=True, slots=True)
class Entry:
    """Records of one field, ``record`` bytes each.

    Attributes:
        rows: the rows they belong to, local to the shard: a range of step 1, or the index of a row set of the shard.
    """

    field: str
    codec: str
    record: int
    rows: range | int
    at: Span


@dataclass(frozen=True, slots=True)
class ShardEntries:
    """A shard and what this checkpoint holds of it. Of two entries that carry a row of a field, the later one holds.

    Attributes:
        replicated: several ranks hold this very shard, all alike; each has written some of its rows.
    """

    shard: Shard
    rowsets: tuple[RowSet, ...]
    entries: tuple[Entry, ...]
    replicated: bool = False

    def row_count(self, entry: Entry) -> int:
        return len(entry.rows) if isinstance(entry.rows, range) else self.rowsets[entry.rows].count


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of the state: C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    at: Span


@dataclass(frozen=True, slots=True)
class State:
    """A tree (see tree.py; not verified here) and the tensors that it names by index."""

    name: str
    tree: Any
    tensors: tuple[StateTensor, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """What decides whether a shard is wanted; see ShardEntries and Shard."""

    table: str
    row_start: int
    rows: int
    col_start: int
    cols: int
    replicated: bool


Wanted = Callable[[Place], bool]
