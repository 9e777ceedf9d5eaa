"""The rank manifest: what one rank wrote, and where each byte of it lies (docs/format.md, section 6).

It must not know other ranks or the checkpoint as a whole, and does not look into packs, row sets or trees.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from incremental_ckpt.format.columns import Columns
from incremental_ckpt.format.documents import read_document, write_document
from incremental_ckpt.format.layout import parse_key, rank_manifest_key
from incremental_ckpt.format.members import MalformedError, Members
from incremental_ckpt.format.rank_entries import places_of, read_shards, read_state, written_shard, written_state
from incremental_ckpt.format.rank_facts import SHARED, Pack, ShardEntries, State, Vote, Wanted


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
            "shards": [written_shard(shard) for shard in self.shards],
            "state": [written_state(state) for state in self.state],
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
    places = places_of(Columns.of(members, "shards"))
    states = [state.name("name") for state in members.objects("state")]
    return VoteFacts(
        key=rank_manifest_key(members.integer("seq", 1), members.hexadecimal("attempt", 16), rank),
        vote=_vote(members),
        error=members.text("error"),
        rows=members.integer("rows"),
        table_rows=sum(p.rows for p in places if p.col_start == 0 and (rank == 0 or not p.replicated)),
        pack_bytes=sum(pack.integer("size") for pack in members.objects("packs")),
        shared=SHARED in states or any(place.replicated for place in places),
    )


def _vote(members: Members) -> Vote:
    vote = members.text("vote")
    if vote not in ("ok", "failed"):
        raise MalformedError("vote is neither ok nor failed")
    return "ok" if vote == "ok" else "failed"


def _written_pack(pack: Pack) -> dict[str, Any]:
    header = {"size": pack.header_size, "checksum": pack.header_checksum}
    return {"key": pack.key, "size": pack.size, "header": header}


def _rank_manifest(members: Members, wanted: Wanted | None = None) -> RankManifest:
    world_size = members.integer("world_size", 1)
    shards = Columns.of(members, "shards")
    if wanted is not None:
        shards = shards.chosen([index for index, place in enumerate(places_of(shards)) if wanted(place)])
    manifest = RankManifest(
        seq=members.integer("seq", 1),
        attempt=members.hexadecimal("attempt", 16),
        rank=members.integer("rank", 0, world_size - 1),
        world_size=world_size,
        vote=_vote(members),
        error=members.text("error"),
        packs=tuple(_pack(pack) for pack in members.objects("packs")),
        shards=read_shards(shards),
        state=tuple(read_state(state) for state in members.objects("state")),
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
    if not spans:
        return
    pack, begin, end = (
        np.fromiter(map(operator.attrgetter(name), spans), np.int64) for name in ("pack", "begin", "end")
    )
    if pack.max() >= len(manifest.packs):
        raise MalformedError(f"a span is in pack {pack.max()}, and there are {len(manifest.packs)}")
    first = np.array([own.header_size for own in manifest.packs])[pack]
    last = np.array([own.size for own in manifest.packs])[pack]
    for outside in np.flatnonzero((begin < first) | (end > last)):
        span = spans[outside]
        own = manifest.packs[span.pack]
        raise MalformedError(
            f"a span is at {span.begin}:{span.end} of {own.key}, whose data are at {own.header_size}:{own.size}"
        )
    filled = np.lexsort((end, begin, pack))
    filled = filled[begin[filled] < end[filled]]
    before, after = filled[:-1], filled[1:]
    met = (pack[before] == pack[after]) & (begin[after] < end[before])
    for one, other in zip(before[met], after[met], strict=True):
        left, right = spans[one], spans[other]
        if (left.begin, left.end, left.checksum) != (right.begin, right.end, right.checksum):
            key = manifest.packs[left.pack].key
            raise MalformedError(f"spans {left.begin}:{left.end} and {right.begin}:{right.end} of {key} overlap")
