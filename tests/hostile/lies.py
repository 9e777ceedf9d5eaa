"""What a hostile repository may say, by name: each is made of an honest one.

It must not know which of them a reader has to notice.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from forgery import HUGE, Objects, edited, key_of, members_of, replaced, sealed, sealed_text, with_pack

Lie = Callable[[Mapping[str, bytes]], Objects]

OUTSIDE = [
    "../outside/secret",
    "/etc/passwd",
    "data/../../outside/secret",
    "data/./x",
    "C:\\x",
    "data\0x",
    "",
    "a" * 9999,
]
ODD_NUMBERS: list[Any] = [-1, HUGE, 10**400, 1.5, None, {"$float": "nan"}]
NO_JSON = ("NaN", "Infinity", "-Infinity", "1e999")


def _manifest(edit: Callable[[dict[str, Any]], object], seq: int = 3) -> Lie:
    return lambda objects: edited(objects, key_of(objects, "manifest", seq), edit)


def _rank(edit: Callable[[dict[str, Any]], object], seq: int = 1) -> Lie:
    return lambda objects: edited(objects, key_of(objects, "rank", seq), edit)


def _put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], object]:
    def edit(members: dict[str, Any]) -> None:
        at: Any = members
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return edit


def _named(what: str, values: list[Any], lie: Callable[[Any], Lie]) -> dict[str, Lie]:
    return {f"{what} is {str(value)[:30]!r} ({type(value).__name__})": lie(value) for value in values}


def _grown(members: dict[str, Any]) -> None:
    """A table of 2**40 rows, of which the entries carry the few that there were."""
    for shard in members["shards"]:
        shard["table_rows"] = shard["rows"] = 2**40


def _long(members: dict[str, Any]) -> None:
    """A table of 2**62 rows, of which this shard has the first ones."""
    for shard in members["shards"]:
        shard["table_rows"] = HUGE


def _grown_with_entries(members: dict[str, Any]) -> None:
    """And entries, spans and packs that would hold them all."""
    if not members["shards"]:
        return
    shard = members["shards"][0]
    shard["table_rows"] = shard["rows"] = 2**40
    at = 0
    for pack in members["packs"]:
        pack["size"] = HUGE
    for other in members["shards"]:
        for rowset in other["rowsets"]:
            rowset["at"]["begin"], rowset["at"]["end"] = rowset["at"]["end"], rowset["at"]["end"]
    for entry in shard["entries"]:
        entry["rows"] = {"range": [0, 2**40]}
        begin = members["packs"][entry["at"]["pack"]]["header"]["size"] + (1 << 50) + at
        entry["at"] |= {"begin": begin, "end": begin + entry["record"] * 2**40}
        at += entry["record"] * 2**40


def _wide(members: dict[str, Any]) -> None:
    for shard in members["shards"]:
        shard["table_cols"] = HUGE


def _deep_state(members: dict[str, Any]) -> None:
    tree: Any = 1
    for _ in range(900):
        tree = [tree]
    members["state"][0]["tree"] = tree


def _everywhere(edit: Callable[[dict[str, Any]], object]) -> Lie:
    """The same lie in all three checkpoints."""

    def lie(objects: Mapping[str, bytes]) -> Objects:
        found = dict(objects)
        for seq in (1, 2, 3):
            found = edited(found, key_of(found, "rank", seq), edit)
        return found

    return lie


def _evil_state(tree: Any) -> Lie:
    return _rank(lambda members: [state.update(tree=tree) for state in members["state"]], 3)


def _swapped_spans(members: dict[str, Any]) -> None:
    """Each record where another field's lies: every checksum is right where it is."""
    for shard in members["shards"]:
        entries = shard["entries"]
        for a, b in pairwise(entries):
            if a["at"]["end"] - a["at"]["begin"] == b["at"]["end"] - b["at"]["begin"]:
                a["at"], b["at"] = b["at"], a["at"]


def _everything_at_once(members: dict[str, Any]) -> None:
    """The same entry again and again."""
    shard = members["shards"][0]
    shard["entries"] = shard["entries"] * (2_000 // len(shard["entries"]))


def _text(what: str, seq: int, change: Callable[[bytes], bytes]) -> Lie:
    """A document changed as text, which the writer of JSON would not give."""

    def lie(objects: Mapping[str, bytes]) -> Objects:
        key = key_of(objects, what, seq)
        body = json.dumps(members_of(objects[key]), separators=(",", ":")).encode()
        return replaced(objects, key, sealed_text(change(body)))

    return lie


def _number(member: str, before: str, now: str) -> Callable[[bytes], bytes]:
    return lambda body: body.replace(f'"{member}":{before}'.encode(), f'"{member}":{now}'.encode())


def _deep(body: bytes) -> bytes:
    return b'{"deep":' + b"[" * 200_000 + b"]" * 200_000 + b"," + body[1:]


def _pack(change: Callable[[bytes, int], tuple[bytes, int]], seq: int = 1) -> Lie:
    """A pack whose bytes and length of the header are changed, and which is named as it then is."""

    def lie(objects: Mapping[str, bytes]) -> Objects:
        key = key_of(objects, "pack", seq)
        raw = objects[key]
        header = 8 + struct.unpack_from("<Q", raw)[0]
        changed, length = change(raw, header)
        return with_pack(objects, key, changed, changed[:length])

    return lie


def _header(change: Callable[[dict[str, Any]], object]) -> Lie:
    def apply(raw: bytes, header: int) -> tuple[bytes, int]:
        tensors = json.loads(raw[8:header])
        change(tensors)
        text = json.dumps(tensors).encode()
        text += b" " * (header - 8 - len(text))
        return struct.pack("<Q", len(text)) + text + raw[header:], 8 + len(text)

    return _pack(apply)


def _other_tensors(objects: Mapping[str, bytes]) -> Objects:
    """The packs of the base hold what those of the delta held, and the other way round."""
    a, b = key_of(objects, "pack", 1), key_of(objects, "pack", 2)
    return {**objects, a: objects[b], b: objects[a]}


def _parent_of_itself(members: dict[str, Any]) -> None:
    members["parent"] = {"seq": members["seq"], "digest": "0" * 64}


def _parent_ahead(members: dict[str, Any]) -> None:
    members["parent"] = {"seq": 3, "digest": "0" * 64}


def _loop_of_bases(objects: Mapping[str, bytes]) -> Objects:
    """Equivalent bases that name the manifests of each other."""
    found = dict(objects)
    for seq, other in ((2, 3), (3, 2)):
        members = members_of(objects[key_of(objects, "manifest", seq)])
        digest = json.loads(objects[key_of(objects, "manifest", other)])["digest"]
        found[f"manifests/{seq:08d}.base.json"] = sealed(members | {"of": digest, "kind": "base", "parent": None})
    return found


LIES: dict[str, Lie] = {
    **_named("a rank manifest's key", OUTSIDE, lambda v: _manifest(_put("ranks", 0, "key", value=v))),
    **_named("a pack's key", OUTSIDE, lambda v: _rank(_put("packs", 0, "key", value=v))),
    **_named("a rank manifest's size", ODD_NUMBERS, lambda v: _manifest(_put("ranks", 0, "size", value=v))),
    **_named("world_size", ODD_NUMBERS, lambda v: _manifest(_put("world_size", value=v))),
    **_named("seq", ODD_NUMBERS, lambda v: _manifest(_put("seq", value=v))),
    **_named("a pack's size", ODD_NUMBERS, lambda v: _rank(_put("packs", 0, "size", value=v))),
    **_named("a header's size", ODD_NUMBERS, lambda v: _rank(_put("packs", 0, "header", "size", value=v))),
    **_named("table_rows", ODD_NUMBERS, lambda v: _rank(_put("shards", 0, "table_rows", value=v))),
    **_named("rows", ODD_NUMBERS, lambda v: _rank(_put("shards", 0, "rows", value=v))),
    **_named("table_cols", ODD_NUMBERS, lambda v: _rank(_put("shards", 0, "table_cols", value=v))),
    **_named("width", ODD_NUMBERS, lambda v: _rank(_put("shards", 0, "fields", 0, "width", value=v))),
    **_named("record", ODD_NUMBERS, lambda v: _rank(_put("shards", 0, "entries", 0, "record", value=v))),
    **_named("a span's end", ODD_NUMBERS, lambda v: _rank(_put("shards", 0, "entries", 0, "at", "end", value=v))),
    **_named("a span's pack", ODD_NUMBERS, lambda v: _rank(_put("shards", 0, "entries", 0, "at", "pack", value=v))),
    **_named("a row set's count", ODD_NUMBERS, lambda v: _rank(_put("shards", 0, "rowsets", 0, "count", value=v), 2)),
    **_named("a shape", ODD_NUMBERS, lambda v: _rank(_put("state", 0, "tensors", 0, "shape", value=[v]), 3)),
    "a table of 2^40 rows in its base": _rank(_grown),
    "tables of 2^40 rows": _everywhere(_grown),
    "tables of 2^62 rows, mostly elsewhere": _everywhere(_long),
    "a table of 2^40 rows with entries in its base": _rank(_grown_with_entries),
    "tables of 2^40 rows with entries": _everywhere(_grown_with_entries),
    "a table of 2^62 columns in its base": _rank(_wide),
    "tables of 2^62 columns": _everywhere(_wide),
    "two thousand times the same entry": _rank(_everything_at_once),
    "records of other fields": _rank(_swapped_spans),
    "packs of other tensors": _other_tensors,
    "deep state": _rank(_deep_state, 3),
    "state of another class": _evil_state({"$class": "os.system", "args": ["touch pwned"]}),
    "state that is a device": _evil_state({"$device": "__import__('os').system('touch pwned')"}),
    "state that is a dtype": _evil_state({"$dtype": "__class__"}),
    "state of a tensor that is not there": _evil_state({"$tensor": HUGE}),
    "a parent that is itself": _manifest(_parent_of_itself),
    "a parent that is ahead": _manifest(_parent_ahead, 2),
    "a loop of bases": _loop_of_bases,
    "a deep manifest": _text("manifest", 3, _deep),
    "a deep rank manifest": _text("rank", 3, _deep),
    "a member twice": _text("manifest", 3, lambda body: body[:-1] + b',"seq":3}'),
    "bytes that are not UTF-8": _text("manifest", 3, lambda body: body[:-1] + b',"x":"\xff\xfe"}'),
    **{f"{name} as a step": _text("manifest", 3, _number("step", "3", name)) for name in NO_JSON},
    **{f"{name} as a loss": _text("manifest", 3, _number("loss", "null", name)) for name in NO_JSON},
    **{f"{name} as a size": _text("rank", 3, _number("world_size", "1", name)) for name in NO_JSON},
    "a header of 2**63 bytes": _pack(lambda raw, header: (struct.pack("<Q", 2**63) + raw[8:], header)),
    "a header longer than its pack": _pack(lambda raw, header: (struct.pack("<Q", len(raw) + 1) + raw[8:], header)),
    "a header of nothing": _pack(lambda raw, header: (struct.pack("<Q", 0) + raw[8:], 8)),
    "a header of other offsets": _header(lambda t: next(iter(t.values())).update(data_offsets=[0, HUGE])),
    "a header of negative offsets": _header(lambda t: next(iter(t.values())).update(data_offsets=[-8, 0])),
    "a header of another shape": _header(lambda t: next(iter(t.values())).update(shape=[HUGE, HUGE])),
    "a header without tensors": _header(lambda t: t.clear()),
    "an empty pack": _pack(lambda raw, header: (b"", 0)),
}  # fmt: skip
