"""The manifest: one file for the whole checkpoint, whose existence is the checkpoint (docs/format.md, section 5).

It must not know stores. The other documents are imported from here too: they come from markers.py and rank_manifest.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from typing import Any

from incremental_ckpt.format.documents import read_document, write_document
from incremental_ckpt.format.layout import base_key, manifest_key, parse_key
from incremental_ckpt.format.markers import FEATURES, Gone, Outcome, RepoFile, Resume
from incremental_ckpt.format.members import (
    MAX_INT,
    MalformedError,
    Members,
    number,
    written_float,
    written_plain,
    written_time,
)
from incremental_ckpt.format.rank_facts import (
    CODECS,
    Entry,
    Pack,
    Place,
    RowSet,
    ShardEntries,
    Span,
    State,
    StateTensor,
    Vote,
    Wanted,
)
from incremental_ckpt.format.rank_manifest import RankManifest, VoteFacts
from incremental_ckpt.format.sealed import FORMAT
from incremental_ckpt.model import CheckpointInfo, CheckpointRef, Kind

__all__ = [
    "CODECS",
    "FEATURES",
    "FORMAT",
    "Entry",
    "Gone",
    "Lineage",
    "Manifest",
    "Outcome",
    "Pack",
    "Place",
    "RankManifest",
    "RankRef",
    "RepoFile",
    "Resume",
    "RowSet",
    "ShardEntries",
    "Span",
    "State",
    "StateTensor",
    "Totals",
    "Vote",
    "VoteFacts",
    "Wanted",
    "ancestors",
    "owner",
]


@dataclass(frozen=True)
class RankRef:
    """A rank manifest by key, size in bytes and digest.

    Attributes:
        shared: it holds state or rows that all ranks need, whatever their shards.
    """

    key: str
    size: int
    digest: str
    shared: bool = False


@dataclass(frozen=True)
class Lineage:
    """A job, the first seq that it could commit, and the seq that it resumed from (0: it started afresh)."""

    job: str
    first: int
    resumed: int


@dataclass(frozen=True)
class Totals:
    """Rows carried, rows of all tables, and bytes of packs and rank manifests."""

    rows: int
    table_rows: int
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The document whose existence is the checkpoint; with ``of``, an equivalent base of the one with that digest.

    Attributes:
        parent: what a delta builds on; None for a base.
        next_parent: what this job's next delta builds on; None: this very checkpoint.
        lineage: the job of a seq is the last entry with ``first <= seq``.
        digest: the identity of a manifest that was read; empty for one that is to be written, and no part of equality.
    """

    seq: int
    step: int
    epoch: int | None
    loss: float | None
    metrics: Mapping[str, float]
    kind: Kind
    parent: CheckpointRef | None
    next_parent: CheckpointRef | None
    job: str
    attempt: str
    lineage: tuple[Lineage, ...]
    created: datetime
    world_size: int
    ranks: tuple[RankRef, ...]
    totals: Totals
    environment: Mapping[str, Any]
    of: str | None = None
    digest: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        return manifest_key(self.seq) if self.of is None else base_key(self.seq)

    @property
    def ref(self) -> CheckpointRef:
        """Raises ValueError for a manifest that was not read: its digest is not known."""
        if not self.digest:
            raise ValueError(f"the manifest of seq {self.seq} has no digest yet: read it back with from_bytes")
        return CheckpointRef(self.seq, self.digest)

    def info(self) -> CheckpointInfo:
        return CheckpointInfo(
            seq=self.seq,
            step=self.step,
            epoch=self.epoch,
            loss=self.loss,
            metrics=self.metrics,
            kind=self.kind,
            parent=None if self.parent is None else self.parent.seq,
            bytes=self.totals.bytes,
            rows=self.totals.rows,
            table_rows=self.totals.table_rows,
            created=self.created,
            job=self.job,
            attempt=self.attempt,
            world_size=self.world_size,
        )

    def to_bytes(self) -> bytes:
        """Raises ValueError for what ``from_bytes`` would refuse."""
        totals = {"rows": self.totals.rows, "table_rows": self.totals.table_rows, "bytes": self.totals.bytes}
        members = {
            "seq": self.seq,
            "step": self.step,
            "epoch": self.epoch,
            "loss": None if self.loss is None else written_float(float(self.loss)),
            "metrics": {name: written_float(float(value)) for name, value in self.metrics.items()},
            "kind": self.kind,
            "parent": _written_ref(self.parent),
            "next_parent": _written_ref(self.next_parent),
            "job": self.job,
            "attempt": self.attempt,
            "lineage": [{"job": entry.job, "first": entry.first, "resumed": entry.resumed} for entry in self.lineage],
            "created": written_time(self.created),
            "world_size": self.world_size,
            "ranks": [_written_rank_ref(rank) for rank in self.ranks],
            "totals": totals,
            "environment": written_plain(self.environment),
        }
        if self.of is not None:
            members["of"] = self.of
        return write_document(members, _manifest)

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, key: str) -> Manifest:
        """Raises CorruptionError for anything malformed or of another key, FormatError for a newer format."""
        return read_document(raw, key, _read_manifest)


def owner(lineage: Sequence[Lineage], seq: int) -> Lineage:
    """The job to which ``seq`` belongs in the history that ``lineage`` tells."""
    for entry in reversed(lineage):
        if entry.first <= seq:
            return entry
    raise ValueError(f"seq {seq} is before the lineage's first entry")


def ancestors(lineage: Sequence[Lineage], seq: int) -> Iterator[int]:
    """``seq`` itself, then the numbers whose states lie behind its state, newest first; gone ones among them."""
    while seq:
        entry = owner(lineage, seq)
        yield from range(seq, entry.first - 1, -1)
        seq = entry.resumed


def _written_ref(ref: CheckpointRef | None) -> dict[str, Any] | None:
    return None if ref is None else {"seq": ref.seq, "digest": ref.digest}


def _read_manifest(members: Members) -> Manifest:
    return replace(_manifest(members), digest=members.hexadecimal("digest", 64))


def _manifest(members: Members) -> Manifest:
    kind = members.text("kind")
    if kind not in ("base", "delta"):
        raise MalformedError("kind is neither base nor delta")
    seq = members.integer("seq", 1)
    totals = members.object("totals")
    manifest = Manifest(
        seq=seq,
        step=members.integer("step", -MAX_INT),
        epoch=members.optional("epoch", lambda name: members.integer(name, -MAX_INT)),
        loss=members.optional("loss", members.number),
        metrics={name: number(value, f"metrics.{name}") for name, value in members.mapping("metrics").items()},
        kind="base" if kind == "base" else "delta",
        parent=members.optional("parent", lambda name: _ref(members.object(name), seq)),
        next_parent=members.optional("next_parent", lambda name: _ref(members.object(name), seq)),
        job=members.hexadecimal("job", 16),
        attempt=members.hexadecimal("attempt", 16),
        lineage=tuple(_lineage(entry) for entry in members.objects("lineage")),
        created=members.time("created"),
        world_size=members.integer("world_size", 1),
        ranks=tuple(_rank_ref(rank) for rank in members.objects("ranks")),
        totals=Totals(totals.integer("rows"), totals.integer("table_rows"), totals.integer("bytes")),
        environment=members.mapping("environment"),
        of=members.hexadecimal("of", 64) if "of" in members else None,
    )
    if (manifest.kind == "base") != (manifest.parent is None):
        raise MalformedError("parent is given for a base, or missing for a delta")
    _check_lineage(manifest)
    _check_ranks(manifest)
    return manifest


def _ref(members: Members, seq: int) -> CheckpointRef:
    return CheckpointRef(members.integer("seq", 1, seq - 1), members.hexadecimal("digest", 64))


def _lineage(members: Members) -> Lineage:
    first = members.integer("first", 1)
    return Lineage(members.hexadecimal("job", 16), first, members.integer("resumed", 0, first - 1))


def _rank_ref(members: Members) -> RankRef:
    shared = members.boolean("shared") if "shared" in members else False
    return RankRef(members.text("key"), members.integer("size", 1), members.hexadecimal("digest", 64), shared)


def _written_rank_ref(rank: RankRef) -> dict[str, Any]:
    shared = {"shared": True} if rank.shared else {}
    return {"key": rank.key, "size": rank.size, "digest": rank.digest, **shared}


def _check_lineage(manifest: Manifest) -> None:
    firsts = [entry.first for entry in manifest.lineage]
    if firsts[:1] != [1] or any(later <= earlier for earlier, later in pairwise(firsts)):
        raise MalformedError("lineage does not start at 1 and ascend")
    if firsts[-1] > manifest.seq:
        raise MalformedError(f"lineage ends with a job that starts at {firsts[-1]}, after this seq")
    if manifest.of is None and manifest.lineage[-1].job != manifest.job:
        raise MalformedError("the last job of lineage is not the manifest's job")


def _check_ranks(manifest: Manifest) -> None:
    if manifest.of is not None:
        if manifest.kind != "base":
            raise MalformedError("an equivalent (it has a member of) is not of kind base")
    elif len(manifest.ranks) != manifest.world_size:
        raise MalformedError(f"ranks has {len(manifest.ranks)} members, and world_size is {manifest.world_size}")
    for rank, ref in enumerate(manifest.ranks):
        parsed = parse_key(ref.key)
        if parsed is None or parsed.what != "rank" or parsed.seq != manifest.seq:
            raise MalformedError(
                f"ranks[{rank}].key is {ref.key[:120]!r}, which is no rank manifest of seq {manifest.seq}"
            )
        # An equivalent may be made of parts that were compacted apart, each of them an attempt.
        if manifest.of is None and (parsed.attempt, parsed.rank) != (manifest.attempt, rank):
            raise MalformedError(f"ranks[{rank}].key is {ref.key}, which is of another rank or attempt")
    if len({ref.key for ref in manifest.ranks}) != len(manifest.ranks):
        raise MalformedError("ranks names one key twice")
