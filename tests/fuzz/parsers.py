"""Every parser of the format as a function of bytes, and honest bytes for each to begin from.

It must not know who makes the bytes up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from incremental_ckpt.errors import CorruptionError, FormatError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import (
    Gone,
    Lineage,
    Manifest,
    Outcome,
    RankManifest,
    RankRef,
    RepoFile,
    Resume,
    Totals,
    VoteFacts,
)
from incremental_ckpt.format.pack import PackBuilder, read_header
from incremental_ckpt.format.rank_facts import Entry, RowSet, ShardEntries, State, StateTensor
from incremental_ckpt.format.rowset import decode_rows, encode_rows
from incremental_ckpt.format.sealed import unseal
from incremental_ckpt.format.tree import from_tree
from incremental_ckpt.model import Field, Shard

ATTEMPT, JOB, NOW = "0123456789abcdef", "fedcba9876543210", datetime(2026, 1, 31, 12, tzinfo=UTC)
RANK_KEY = layout.rank_manifest_key(1, ATTEMPT, 0)
PACK_KEY = layout.pack_key(1, ATTEMPT, 0, 0)
ROWS, COUNT = 100_000, 5

Parse = Callable[[bytes], object]


def _read_tree(raw: bytes) -> object:
    """Trees come out of rank manifests: what is no JSON never gets as far as this."""
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return from_tree(tree, [np.arange(3), np.asarray(1.5)], key=RANK_KEY, make=lambda tag, value: (tag, value))


def _read_key(raw: bytes) -> object:
    parsed = layout.parse_key(raw.decode("utf-8", "replace"))
    assert parsed is None or ".." not in raw.decode().split("/"), "a key leads out of the store"
    return parsed


PARSERS: Mapping[str, Parse] = {
    "manifest": lambda raw: Manifest.from_bytes(raw, layout.manifest_key(1)),
    "rank manifest": lambda raw: RankManifest.from_bytes(raw, RANK_KEY),
    "part of a rank manifest": lambda raw: RankManifest.partly_from_bytes(raw, RANK_KEY, lambda place: place.rows > 5),
    "vote": lambda raw: VoteFacts.from_bytes(raw, RANK_KEY),
    "resume": lambda raw: Resume.from_bytes(raw, layout.resume_key(JOB, 1)),
    "outcome": lambda raw: Outcome.from_bytes(raw, layout.outcome_key(1, ATTEMPT)),
    "gone": lambda raw: Gone.from_bytes(raw, layout.gone_key(1)),
    "repo": lambda raw: RepoFile.from_bytes(raw, layout.REPO),
    "sealed": lambda raw: unseal(raw, "key"),
    "pack": lambda raw: read_header(raw, PACK_KEY, len(raw)),
    "row set": lambda raw: decode_rows(raw, count=COUNT, rows=ROWS, key=PACK_KEY),
    "tree": _read_tree,
    "key": _read_key,
}
SEALED = PARSERS.keys() - {"pack", "row set", "tree", "key"}


def parse(name: str, raw: bytes) -> object:
    """What a parser makes of the bytes; None where it refuses them in one of the two ways that are allowed."""
    try:
        return PARSERS[name](raw)
    except (CorruptionError, FormatError) as refusal:
        assert str(refusal)
        return None


def sealed(body: bytes) -> bytes:
    """With its right digest, whatever it is: most of a parser lies behind that check."""
    body = body if body.startswith(b"{") else b"{" + body
    return b'{"digest":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body[1:]


def unsealed(raw: bytes) -> bytes:
    """What ``sealed`` made ``raw`` of."""
    return b"{" + raw[len('{"digest":"') + 64 + len('",') :]


def _documents() -> dict[str, bytes]:
    builder = PackBuilder()
    ids = encode_rows(np.array([1, 2, 70, 1000, 99_999], dtype=np.int64))
    builder.add("ids", "uint8", [len(ids)], [ids])
    builder.add("rows", "uint8", [COUNT, 16], [bytes(COUNT * 16)])
    builder.add("state", "int64", [3], [bytes(24)])
    pack = builder.finish(PACK_KEY, 0)
    at_ids, at_rows, at_state = pack.spans
    shard = Shard("t", ROWS, 4, 0, ROWS, 0, 4, (Field("weight", "float32", 4),))
    part = ShardEntries(shard, (RowSet(COUNT, at_ids),), (Entry("weight", "raw", 16, 0, at_rows),))
    tree: Any = {"a": [1, {"$tuple": [{"$float": "nan"}, {"$tensor": 0}]}], "b": {"$dict": [[1, {"$bytes": "AP8="}]]}}
    state = State("shared", tree, (StateTensor("int64", (3,), at_state),))
    rank = RankManifest(1, ATTEMPT, 0, 1, "ok", "", (pack.pack,), (part,), (state,), COUNT)
    manifest = Manifest(
        seq=1, step=7, epoch=None, loss=0.5, metrics={"auc": float("nan")}, kind="base", parent=None, next_parent=None,
        job=JOB, attempt=ATTEMPT, lineage=(Lineage(JOB, 1, 0),), created=NOW, world_size=1,
        ranks=(RankRef(RANK_KEY, 9, "0" * 64),), totals=Totals(5, ROWS, 99), environment={"torch": "2"},
    )  # fmt: skip
    raw = rank.to_bytes()
    return {
        "manifest": manifest.to_bytes(),
        "rank manifest": raw,
        "part of a rank manifest": raw,
        "vote": raw,
        "resume": Resume(JOB, 1, 0, 1, NOW).to_bytes(),
        "outcome": Outcome(1, ATTEMPT, True, "").to_bytes(),
        "gone": Gone(1, NOW).to_bytes(),
        "repo": RepoFile(1, ()).to_bytes(),
        "sealed": raw,
        "pack": b"".join(bytes(part) for part in pack.parts),
        "row set": ids,
        "tree": json.dumps(tree).encode(),
        "key": PACK_KEY.encode(),
    }


HONEST: Mapping[str, bytes] = _documents()
