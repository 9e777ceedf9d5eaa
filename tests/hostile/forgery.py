"""Repositories that lie: well sealed, every digest right, and what they say is not so.

It must not know what a reader makes of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from lives import TINY
from small_runs import Run

from incremental_ckpt import Checkpointer
from incremental_ckpt.format import layout
from incremental_ckpt.format.pack import checksum
from incremental_ckpt.format.sealed import digest_of, seal
from incremental_ckpt.storage import MemoryStore

Objects = dict[str, bytes]
Edit = Callable[[dict[str, Any]], object]

HUGE = 2**62


def honest() -> Objects:
    """A base, two deltas and nothing else, one rank."""
    run, store = Run("adagrad"), MemoryStore()
    with Checkpointer(run.model, store, **run.arguments, settings=TINY) as checkpointer:
        for step, kind in enumerate(("full", "consecutive", "consecutive"), 1):
            run.train()
            checkpointer.save_checkpoint(step, kind=kind).wait()  # type: ignore[arg-type]
    return {one.key: bytes(store.get(one.key)) for one in store.list()}


def key_of(objects: Mapping[str, bytes], what: str, seq: int) -> str:
    """The first key of a sort: manifest, rank, pack."""
    return min(key for key in objects if (p := layout.parse_key(key)) and (p.what, p.seq) == (what, seq))


def members_of(raw: bytes) -> dict[str, Any]:
    members: dict[str, Any] = json.loads(raw)
    del members["digest"]
    return members


def edited(objects: Mapping[str, bytes], key: str, edit: Edit) -> Objects:
    """One document changed and sealed anew, and all that name it by its digest after it."""
    members = members_of(objects[key])
    edit(members)
    return replaced(objects, key, sealed(members))


def sealed(members: Mapping[str, Any]) -> bytes:
    """Sealed also where the library's own writer refuses: too deep, NaN."""
    try:
        return seal(members)
    except (ValueError, RecursionError):
        return sealed_text(json.dumps(members, separators=(",", ":")).encode())


def sealed_text(body: bytes) -> bytes:
    """What begins with ``{`` and need not be JSON, with the digest that it would have."""
    return b'{"digest":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body[1:]


def replaced(objects: Mapping[str, bytes], key: str, raw: bytes) -> Objects:
    """Other bytes under a key; whatever names the digest of the old ones names that of the new ones."""
    before, found = objects[key], {**objects, key: raw}
    old, new = _digest(before), _digest(raw)
    if old is None or new is None or old == new:
        return found
    for other, value in objects.items():
        if other != key and old.encode() in value and other.endswith(".json"):
            members = json.loads(value.replace(old.encode(), new.encode()))
            del members["digest"]
            for rank in members.get("ranks", ()):
                if rank["key"] == key:
                    rank["size"] = len(raw)
            found = replaced(found, other, sealed(members))
    return found


def with_pack(objects: Mapping[str, bytes], key: str, raw: bytes, header: bytes) -> Objects:
    """Another pack, of which the rank manifest gives the size and the checksum of the header."""
    parsed = layout.parse_key(key)
    assert parsed is not None

    def name(members: dict[str, Any]) -> None:
        pack = next(pack for pack in members["packs"] if pack["key"] == key)
        pack |= {"size": len(raw), "header": {"size": len(header), "checksum": checksum(header)}}

    rank = layout.rank_manifest_key(parsed.seq, parsed.attempt, parsed.rank)
    return edited({**objects, key: raw}, rank, name)


def _digest(raw: bytes) -> str | None:
    try:
        return digest_of(raw)
    except ValueError:
        return None
