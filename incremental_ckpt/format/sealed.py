"""Sealed JSON objects: bytes that begin with the SHA-256 of the rest (docs/format.md, section 4).

It must not know what the members mean, except `format`, which decides whether this version may read them at all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from incremental_ckpt.errors import CorruptionError, FormatError

FORMAT = 1
MAX_BYTES = 256 * 2**20
MAX_DEPTH = 64

_PREFIX = re.compile(rb'\{"digest":"([0-9a-f]{64})",')
_PREFIX_BYTES = len('{"digest":"') + 64 + len('",')
_SMALL = 1 << 14
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}:'))


class _NotPlainError(ValueError):
    """JSON that parses but that a reader must refuse."""


def seal(members: Mapping[str, Any]) -> bytes:
    """The sealed object with these members, in the order given.

    Raises:
        ValueError: no members, a member named digest, a number that JSON lacks, or what readers must refuse
            (more than MAX_BYTES, nested deeper than MAX_DEPTH).
    """
    if not members or "digest" in members:
        raise ValueError("a sealed object needs members, and its digest is computed, not given")
    body = json.dumps(members, separators=(",", ":"), allow_nan=False).encode("ascii")
    digest = hashlib.sha256(body).hexdigest()
    raw = b'{"digest":"' + digest.encode("ascii") + b'",' + memoryview(body)[1:]
    if len(raw) > MAX_BYTES:
        raise ValueError(f"an object of {len(raw)} bytes cannot be sealed: readers refuse more than {MAX_BYTES}")
    if _depth(body) > MAX_DEPTH:
        raise ValueError(f"an object nested deeper than {MAX_DEPTH} levels cannot be sealed: readers refuse it")
    return raw


def unseal(raw: bytes | memoryview, key: str) -> dict[str, Any]:
    """The members of a sealed object, its digest among them.

    Raises:
        CorruptionError: not a sealed object, another digest than its own, or beyond the limits of the format.
        FormatError: sealed and whole, but written by a later version of the format.
    """
    size = memoryview(raw).nbytes
    if size > MAX_BYTES:
        raise _corrupt(key, "it is too large", f"at most {MAX_BYTES} bytes", f"{size} bytes")
    text = bytes(raw)
    match = _PREFIX.match(text)
    if match is None:
        raise _corrupt(key, "it does not begin with a digest", '{"digest":"<64 hex>",', repr(text[:_PREFIX_BYTES]))
    sha = hashlib.sha256(b"{")
    sha.update(memoryview(text)[_PREFIX_BYTES:])
    expected, found = match[1].decode("ascii"), sha.hexdigest()
    if found != expected:
        raise _corrupt(key, "its digest does not match", expected, found)
    try:
        members = parse_json(text)
    except ValueError as error:
        raise _corrupt(key, str(error)) from error
    version = members.get("format", FORMAT)
    if type(version) is not int or version < 1:
        raise _corrupt(key, "its format is no version number", f"1 to {FORMAT}", repr(version)[:80])
    if version > FORMAT:
        raise FormatError(
            f"{key} is in format {version}, and this version reads formats up to {FORMAT}: upgrade incremental_ckpt"
        )
    return members


def digest_of(raw: bytes | memoryview) -> str:
    """The digest that a sealed object carries, by which others name it. Not verified: for bytes from ``seal``."""
    match = _PREFIX.match(bytes(raw[:_PREFIX_BYTES]))
    if match is None:
        raise ValueError("not a sealed object: it does not begin with a digest")
    return match[1].decode("ascii")


def parse_json(text: bytes) -> dict[str, Any]:
    """The JSON object in ``text``, within the limits of the format.

    Raises:
        ValueError: not UTF-8, not JSON, not an object, nested too deep, a repeated member name, NaN or Infinity.
    """
    small = len(text) <= _SMALL  # there a look at each object is the quicker one
    members = 0

    def count(found: dict[str, Any]) -> dict[str, Any]:
        nonlocal members
        members += len(found)
        return found

    try:
        if small:
            value = _SMALL_DECODER.decode(str(text, "utf-8"))
        else:
            value = json.loads(str(text, "utf-8"), object_hook=count, parse_constant=_refuse_constant)
    except RecursionError:
        raise _NotPlainError("its JSON is nested too deep") from None
    except _NotPlainError:
        raise
    except ValueError as error:
        raise _NotPlainError(f"it is not valid JSON in UTF-8 ({error})") from error
    if not isinstance(value, dict):
        raise _NotPlainError("it is not a JSON object")
    depth, written = (_depth(text), members) if small else _structure(text)
    if depth > MAX_DEPTH:
        raise _NotPlainError(f"its JSON is nested deeper than {MAX_DEPTH} levels")
    if members != written:
        raise _NotPlainError(_TWICE)
    return value


def _depth(text: bytes) -> int:
    """How deep valid JSON is nested, or some number up to MAX_DEPTH where it cannot be deeper than that."""
    return 0 if text.count(b"[") + text.count(b"{") <= MAX_DEPTH else _structure(text)[0]


def _structure(text: bytes) -> tuple[int, int]:
    """How deep valid JSON is nested, and how many members are written in it: looking at each object while it is parsed
    takes as long as parsing."""
    import numpy as np  # here: loading it takes longer than `ickpt ls` of a thousand checkpoints

    if b"\\" in text:  # escapes stand in strings only, and of two backslashes in a row the second escapes nothing
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(text.translate(None, _NOT_STRUCTURE), np.uint8)
    outside = ~np.bitwise_xor.accumulate(marks == ord('"'))
    steps = np.zeros(256, np.int8)
    steps[list(b"[{")] = 1
    steps[list(b"]}")] = -1
    depth = np.cumsum(steps[marks] * outside, dtype=np.int32).max(initial=0)
    return int(depth), int(np.count_nonzero((marks == ord(":")) & outside))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _NotPlainError(_TWICE)
    return members


def _refuse_constant(name: str) -> float:
    raise _NotPlainError(f"it contains {name}, which JSON lacks")


_TWICE = "a member name occurs twice in one of its JSON objects"
_SMALL_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _corrupt(key: str, why: str, expected: str = "", found: str = "") -> CorruptionError:
    detail = f" (expected {expected}, found {found})" if expected or found else ""
    return CorruptionError(
        f"{key} is damaged: {why}{detail}. Restore the object from a copy, or resume from an ancestor",
        key=key,
        expected=expected,
        found=found,
    )
