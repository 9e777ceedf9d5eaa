"""The checkpoints of a store as `ickpt ls` lists them: of each manifest only what is shown is read.

It must not know how they are drawn, and loads neither numpy nor torch: starting takes longer than listing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

from incremental_ckpt.errors import CheckpointError, CorruptionError, FormatError, NotFoundError
from incremental_ckpt.format import layout
from incremental_ckpt.format.documents import read_document
from incremental_ckpt.format.members import MAX_INT, MalformedError, Members, number
from incremental_ckpt.model import CheckpointInfo
from incremental_ckpt.repository.listing import check_size, list_checkpoints
from incremental_ckpt.repository.repo_file import is_repository
from incremental_ckpt.storage import LocalStore, MemoryStore, Store
from incremental_ckpt.storage.parallel import run_all

_REMOTE_READS = 16
"""At a time: what a store behind a network costs is the wait for each answer."""


@dataclass(frozen=True)
class Listed:
    """A checkpoint, and the size of the equivalent base that stands beside it (None: there is none)."""

    info: CheckpointInfo
    equivalent_bytes: int | None

    @property
    def stored_bytes(self) -> int:
        return self.info.bytes + (self.equivalent_bytes or 0)


@dataclass(frozen=True)
class Unreadable:
    """A manifest that cannot be read: that of a checkpoint, or of the equivalent base beside it."""

    seq: int
    equivalent: bool
    error: CheckpointError


@dataclass(frozen=True)
class Catalogue:
    """By ascending seq: the checkpoints that can be listed, and all manifests that cannot be read."""

    checkpoints: tuple[Listed, ...]
    unreadable: tuple[Unreadable, ...]


def read_catalogue(store: Store) -> Catalogue:
    """
    A manifest is verified by its digest and in what is shown; `check` looks at the rest.

    Raises:
        FormatError, CorruptionError: the store holds something else, a newer format, or a damaged ``repo.json``.
        StorageError: the store does not answer.
    """
    if not is_repository(store):
        return Catalogue((), ())
    listing, too_large = list_checkpoints(store, 0)
    found: dict[tuple[int, bool], _Manifest | CheckpointError] = {}

    def read(seq: int, equivalent: bool) -> None:
        key = layout.base_key(seq) if equivalent else layout.manifest_key(seq)
        try:
            check_size(store, key, too_large.get(key, 0))
            found[seq, equivalent] = read_document(store.get(key), key, _manifest)
        except (CorruptionError, FormatError, NotFoundError) as error:
            found[seq, equivalent] = error

    wanted = [(seq, False) for seq in listing.seqs]
    wanted += [(seq, True) for seq in listing.seqs if seq in listing.bases]
    if isinstance(store, (LocalStore, MemoryStore)):
        for one in wanted:
            read(*one)
    else:
        run_all([partial(read, *one) for one in wanted], _REMOTE_READS)
    checkpoints, unreadable = list[Listed](), list[Unreadable]()
    for seq in listing.seqs:
        manifest, beside = found[seq, False], found.get((seq, True))
        if isinstance(manifest, CheckpointError):
            unreadable.append(Unreadable(seq, False, manifest))
        if isinstance(beside, CheckpointError):
            unreadable.append(Unreadable(seq, True, beside))
        if isinstance(manifest, _Manifest):
            # One of other content stands for nothing, and a resume passes over it.
            equivalent = beside if isinstance(beside, _Manifest) and beside.of == manifest.digest else None
            checkpoints.append(Listed(manifest.info, equivalent.info.bytes if equivalent else None))
    return Catalogue(tuple(checkpoints), tuple(unreadable))


def checkpoint_json(info: CheckpointInfo, equivalent_bytes: int | None) -> dict[str, Any]:
    facts = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    listed = Listed(info, equivalent_bytes)
    return facts | {"equivalent_bytes": equivalent_bytes, "stored_bytes": listed.stored_bytes}


def catalogue_json(found: Catalogue) -> list[dict[str, Any]]:
    return [checkpoint_json(one.info, one.equivalent_bytes) for one in found.checkpoints]


@dataclass(frozen=True)
class _Manifest:
    """What a listing shows of a manifest; ``of``: the digest of the checkpoint that it is an equivalent base of."""

    info: CheckpointInfo
    digest: str
    of: str | None

    @property
    def key(self) -> str:
        return layout.manifest_key(self.info.seq) if self.of is None else layout.base_key(self.info.seq)


def _manifest(members: Members) -> _Manifest:
    kind, seq, totals = members.text("kind"), members.integer("seq", 1), members.object("totals")
    if kind not in ("base", "delta"):
        raise MalformedError("kind is neither base nor delta")
    parent = members.optional("parent", lambda name: members.object(name).integer("seq", 1, seq - 1))
    if (kind == "base") != (parent is None):
        raise MalformedError("parent is given for a base, or missing for a delta")
    info = CheckpointInfo(
        seq=seq,
        step=members.integer("step", -MAX_INT),
        epoch=members.optional("epoch", lambda name: members.integer(name, -MAX_INT)),
        loss=members.optional("loss", members.number),
        metrics={name: number(value, f"metrics.{name}") for name, value in members.mapping("metrics").items()},
        kind="base" if kind == "base" else "delta",
        parent=parent,
        bytes=totals.integer("bytes"),
        rows=totals.integer("rows"),
        table_rows=totals.integer("table_rows"),
        created=members.time("created"),
        job=members.hexadecimal("job", 16),
        attempt=members.hexadecimal("attempt", 16),
        world_size=members.integer("world_size", 1),
    )
    return _Manifest(info, members.text("digest"), members.text("of") if "of" in members else None)
