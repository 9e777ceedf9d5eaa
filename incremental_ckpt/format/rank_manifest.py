"""The rank manifest: what one rank wrote, and where each byte of it lies (docs/format.md, section 6).

It must not know other ranks or the checkpoint as a whole, and does not look into packs, row sets or trees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from incremental_ckpt.format.documents import read_document, write_document
from incremental_ckpt.format.layout import parse_key, rank_manifest_key
from incremental_ckpt.format.members import MAX_INT, MalformedError, Members, UnsupportedError, integer
from incremental_ckpt.model import DTYPE_BYTES, Field, Shard

CODECS = frozenset({"raw", "fp16", "bf16", "int8", "int4", "int3", "int2"})
MAX_DIMENSIONS = 32

Vote = Literal["ok", "failed"]
SHARED = "shared"
"""The name of the state that every rank needs."""


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Pack:
    """A pack's key and size, and size and xxh3-64 of its header (with the 8 bytes before it)."""

    key: str
    size: int
    header_size: int
    header_checksum: str


@dataclass(frozen=True)
class RowSet:
    """``count`` row ids, local to the shard, as a roaring bitmap at ``at``."""

    count: int
    at: Span


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the state: C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    at: Span


@dataclass(frozen=True)
class State:
    """A tree (see tree.py; not verified here) and the tensors that it names by index."""

    name: str
    tree: Any
    tensors: tuple[StateTensor, ...]


@dataclass(frozen=True)
class RankManifest:
    """What one rank wrote for one attempt, or that it failed: its vote.

    Attributes:
        rows: rows of tables that it carries, each once (of a table's column shards, those that begin at column 0).
    """

    seq: int
    attempt: str
    rank: int
    world_size: int
    vote: Vote
    error: str
    packs: tuple[Pack, ...]
    shards: tuple[ShardEntries, ...]
    state: tuple[State, ...]
    rows: int = 0

    @property
    def key(self) -> str:
        return rank_manifest_key(self.seq, self.attempt, self.rank)

    def to_bytes(self) -> bytes:
        """Raises ValueError for what ``from_bytes`` would refuse."""
        members = {
            "seq": self.seq,
            "attempt": self.attempt,
            "rank": self.rank,
            "world_size": self.world_size,
            "vote": self.vote,
            "rows": self.rows,
            "error": self.error,
            "packs": [_written_pack(pack) for pack in self.packs],
            "shards": [_written_shard(shard) for shard in self.shards],
            "state": [_written_state(state) for state in self.state],
        }
        return write_document(members, _rank_manifest)

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, key: str) -> RankManifest:
        """Raises CorruptionError for anything malformed or of another key, FormatError for a newer format or codec."""
        return read_document(raw, key, _rank_manifest)

    @classmethod
    def partly_from_bytes(cls, raw: bytes | memoryview, key: str, wanted: Wanted) -> RankManifest:
        """As ``from_bytes``, with the wanted shards only, which takes a fraction of the time."""
        return read_document(raw, key, lambda members: _rank_manifest(members, wanted))


@dataclass(frozen=True)
class Place:
    """What decides whether a shard is wanted; see ShardEntries and Shard."""

    table: str
    row_start: int
    rows: int
    col_start: int
    cols: int
    replicated: bool


Wanted = Callable[[Place], bool]


@dataclass(frozen=True)
class VoteFacts:
    """What the manifest of a checkpoint says of a rank manifest, or why there is none.

    Attributes:
        rows: rows of tables that it carries.
        table_rows: rows that its tables have; of what several ranks hold, counted by rank 0.
        pack_bytes: size of its packs.
        shared: it holds state or rows that every rank needs.
    """

    key: str
    vote: Vote
    error: str
    rows: int
    table_rows: int
    pack_bytes: int
    shared: bool

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, key: str) -> VoteFacts:
        """The rank has made sure of its vote; whoever resumes verifies it again. Raises as RankManifest does."""
        return read_document(raw, key, _vote_facts)


def _vote_facts(members: Members) -> VoteFacts:
    rank = members.integer("rank")
    vote = members.text("vote")
    if vote not in ("ok", "failed"):
        raise MalformedError("vote is neither ok nor failed")
    places = [_place(shard) for shard in members.objects("shards")]
    states = [state.name("name") for state in members.objects("state")]
    return VoteFacts(
        key=rank_manifest_key(members.integer("seq", 1), members.hexadecimal("attempt", 16), rank),
        vote="ok" if vote == "ok" else "failed",
        error=members.text("error"),
        rows=members.integer("rows"),
        table_rows=sum(p.rows for p in places if p.col_start == 0 and (rank == 0 or not p.replicated)),
        pack_bytes=sum(pack.integer("size") for pack in members.objects("packs")),
        shared=SHARED in states or any(place.replicated for place in places),
    )


def _place(members: Members) -> Place:
    return Place(
        table=members.name("table"),
        row_start=members.integer("row_start"),
        rows=members.integer("rows"),
        col_start=members.integer("col_start"),
        cols=members.integer("cols"),
        replicated=members.boolean("replicated") if "replicated" in members else False,
    )


def _written_pack(pack: Pack) -> dict[str, Any]:
    header = {"size": pack.header_size, "checksum": pack.header_checksum}
    return {"key": pack.key, "size": pack.size, "header": header}


def _written_span(span: Span) -> dict[str, Any]:
    return {
        "pack": span.pack,
        "tensor": span.tensor,
        "begin": span.begin,
        "end": span.end,
        "checksum": span.checksum,
    }


def _written_shard(part: ShardEntries) -> dict[str, Any]:
    shard = part.shard
    return {
        "table": shard.table,
        "table_rows": shard.table_rows,
        "table_cols": shard.table_cols,
        "row_start": shard.row_start,
        "rows": shard.rows,
        "col_start": shard.col_start,
        "cols": shard.cols,
        **({"replicated": True} if part.replicated else {}),
        "fields": [{"name": field.name, "dtype": field.dtype, "width": field.width} for field in shard.fields],
        "rowsets": [{"count": rowset.count, "at": _written_span(rowset.at)} for rowset in part.rowsets],
        "entries": [_written_entry(entry) for entry in part.entries],
    }


def _written_entry(entry: Entry) -> dict[str, Any]:
    if isinstance(entry.rows, range):
        if entry.rows.step != 1:
            raise ValueError(f"an entry of {entry.field} has {entry.rows}: only ranges of step 1 can be written")
        rows: dict[str, Any] = {"range": [entry.rows.start, entry.rows.stop]}
    else:
        rows = {"set": entry.rows}
    return {
        "field": entry.field,
        "codec": entry.codec,
        "record": entry.record,
        "rows": rows,
        "at": _written_span(entry.at),
    }


def _written_state(state: State) -> dict[str, Any]:
    tensors = [
        {"dtype": tensor.dtype, "shape": list(tensor.shape), "at": _written_span(tensor.at)} for tensor in state.tensors
    ]
    return {"name": state.name, "tree": state.tree, "tensors": tensors}


def _rank_manifest(members: Members, wanted: Wanted | None = None) -> RankManifest:
    world_size = members.integer("world_size", 1)
    vote = members.text("vote")
    if vote not in ("ok", "failed"):
        raise MalformedError("vote is neither ok nor failed")
    manifest = RankManifest(
        seq=members.integer("seq", 1),
        attempt=members.hexadecimal("attempt", 16),
        rank=members.integer("rank", 0, world_size - 1),
        world_size=world_size,
        vote="ok" if vote == "ok" else "failed",
        error=members.text("error"),
        packs=tuple(_pack(pack) for pack in members.objects("packs")),
        shards=tuple(
            _shard_entries(shard) for shard in members.objects("shards") if wanted is None or wanted(_place(shard))
        ),
        state=tuple(_state(state) for state in members.objects("state")),
        rows=members.integer("rows"),
    )
    if manifest.vote == "failed" and (manifest.shards or manifest.state):
        raise MalformedError("a failed vote carries shards or state")
    if len({state.name for state in manifest.state}) != len(manifest.state):
        raise MalformedError("two members of state have one name")
    _check_packs(manifest)
    _check_spans(manifest)
    return manifest


def _pack(members: Members) -> Pack:
    header = members.object("header")
    size = members.integer("size", 8)
    return Pack(
        key=members.text("key"),
        size=size,
        header_size=header.integer("size", 8, size),
        header_checksum=header.hexadecimal("checksum", 16),
    )


def _span(members: Members) -> Span:
    begin = members.integer("begin")
    return Span(
        pack=members.integer("pack"),
        tensor=members.text("tensor"),
        begin=begin,
        end=members.integer("end", begin),
        checksum=members.hexadecimal("checksum", 16),
    )


def _shard_entries(members: Members) -> ShardEntries:
    shard = _shard(members)
    rowsets = tuple(
        RowSet(rowset.integer("count", 0, shard.rows), _span(rowset.object("at")))
        for rowset in members.objects("rowsets")
    )
    fields = {field.name: field for field in shard.fields}
    entries = tuple(_entry(entry, shard, fields, rowsets) for entry in members.objects("entries"))
    return ShardEntries(shard, rowsets, entries, members.boolean("replicated") if "replicated" in members else False)


def _shard(members: Members) -> Shard:
    table_rows = members.integer("table_rows")
    table_cols = members.integer("table_cols", 1)
    row_start = members.integer("row_start", 0, table_rows)
    col_start = members.integer("col_start", 0, table_cols - 1)
    fields = tuple(_field(field) for field in members.objects("fields"))
    if not fields:
        raise MalformedError(f"{members.place('fields')} is empty")
    if len({field.name for field in fields}) != len(fields):
        raise MalformedError(f"{members.place('fields')} has two fields of one name")
    return Shard(
        table=members.name("table"),
        table_rows=table_rows,
        table_cols=table_cols,
        row_start=row_start,
        rows=members.integer("rows", 0, table_rows - row_start),
        col_start=col_start,
        cols=members.integer("cols", 1, table_cols - col_start),
        fields=fields,
    )


def _field(members: Members) -> Field:
    return Field(members.name("name"), _dtype(members), members.integer("width", 1))


def _dtype(members: Members) -> str:
    dtype = members.text("dtype")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"{members.place('dtype')} is {dtype[:40]!r}, which this version does not know")
    return dtype


def _entry(members: Members, shard: Shard, fields: dict[str, Field], rowsets: Sequence[RowSet]) -> Entry:
    field = fields.get(members.text("field"))
    if field is None:
        raise MalformedError(f"{members.place('field')} is none of the shard's fields")
    codec = members.text("codec")
    if codec not in CODECS:
        raise UnsupportedError(f"{members.place('codec')} is {codec[:40]!r}, which this version cannot decode")
    record = members.integer("record", 1)
    if codec == "raw" and record != field.row_bytes:
        raise MalformedError(
            f"{members.place('record')} is {record}, and raw records of {field} have {field.row_bytes} bytes"
        )
    rows = _rows(members.object("rows"), shard, len(rowsets))
    at = _span(members.object("at"))
    count = len(rows) if isinstance(rows, range) else rowsets[rows].count
    if at.size != count * record:
        raise MalformedError(
            f"{members.place('at')} has {at.size} bytes, and {count} records of {record} bytes have another size"
        )
    return Entry(field.name, codec, record, rows, at)


def _rows(members: Members, shard: Shard, rowsets: int) -> range | int:
    if ("set" in members) == ("range" in members):
        raise MalformedError(f"{members.where} is neither a set nor a range")
    if "set" in members:
        return members.integer("set", 0, rowsets - 1)
    bounds = members.items("range")
    if len(bounds) != 2:
        raise MalformedError(f"{members.place('range')} has {len(bounds)} bounds instead of 2")
    start = integer(bounds[0], members.place("range[0]"), 0, shard.rows)
    return range(start, integer(bounds[1], members.place("range[1]"), start, shard.rows))


def _state(members: Members) -> State:
    return State(
        name=members.name("name"),
        tree=members.value("tree"),
        tensors=tuple(_state_tensor(tensor) for tensor in members.objects("tensors")),
    )


def _state_tensor(members: Members) -> StateTensor:
    dtype = _dtype(members)
    shape = tuple(integer(size, members.place("shape")) for size in members.items("shape"))
    if len(shape) > MAX_DIMENSIONS:
        raise MalformedError(f"{members.place('shape')} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    # Without the zeros too: numpy and torch refuse an empty tensor whose other sizes overflow.
    if math.prod(size for size in shape if size) * DTYPE_BYTES[dtype] > MAX_INT:
        raise MalformedError(f"{members.place('shape')} is larger than any memory")
    at = _span(members.object("at"))
    size = math.prod(shape) * DTYPE_BYTES[dtype]
    if at.size != size:
        raise MalformedError(f"{members.place('at')} has {at.size} bytes, and its tensor has {size}")
    return StateTensor(dtype, shape, at)


def _check_packs(manifest: RankManifest) -> None:
    """Packs lie beside their rank manifest, each once: what prune deletes with an attempt is what the attempt wrote."""
    for place, pack in enumerate(manifest.packs):
        parsed = parse_key(pack.key)
        beside = (manifest.seq, manifest.attempt, manifest.rank)
        if parsed is None or parsed.what != "pack" or (parsed.seq, parsed.attempt, parsed.rank) != beside:
            raise MalformedError(f"packs[{place}].key is {pack.key[:120]!r}, which is no pack of this rank and attempt")
    if len({pack.key for pack in manifest.packs}) != len(manifest.packs):
        raise MalformedError("packs names one key twice")


def _check_spans(manifest: RankManifest) -> None:
    """Every span lies inside its pack, behind the header; two spans are the same or share no byte."""
    spans = [rowset.at for part in manifest.shards for rowset in part.rowsets]
    spans += [entry.at for part in manifest.shards for entry in part.entries]
    spans += [tensor.at for state in manifest.state for tensor in state.tensors]
    for span in spans:
        if span.pack >= len(manifest.packs):
            raise MalformedError(f"a span is in pack {span.pack}, and there are {len(manifest.packs)}")
        pack = manifest.packs[span.pack]
        if span.begin < pack.header_size or span.end > pack.size:
            raise MalformedError(
                f"a span is at {span.begin}:{span.end} of {pack.key}, whose data are at {pack.header_size}:{pack.size}"
            )
    filled = sorted((span.pack, span.begin, span.end, span.checksum) for span in spans if span.size)
    for before, after in pairwise(filled):
        if before != after and before[0] == after[0] and after[1] < before[2]:
            key = manifest.packs[after[0]].key
            raise MalformedError(f"spans {before[1]}:{before[2]} and {after[1]}:{after[2]} of {key} overlap")
