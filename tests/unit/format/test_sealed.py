"""Sealed JSON: what is written is read, and nothing that was changed, repeated, nested or newer is."""

from __future__ import annotations

import hashlib
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from incremental_ckpt.errors import CorruptionError, FormatError
from incremental_ckpt.format import sealed
from incremental_ckpt.format.sealed import digest_of, seal, unseal

KEY = "manifests/00000001.json"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


def sealed_by_hand(rest: bytes) -> bytes:
    """A right digest over ``rest``, the object's bytes behind the digest member, valid JSON or not."""
    return b'{"digest":"' + hashlib.sha256(b"{" + rest).hexdigest().encode() + b'",' + rest


@settings(max_examples=60, deadline=None, database=None)
@given(st.dictionaries(st.text(max_size=4).filter(lambda name: name not in ("digest", "format")), JSON, min_size=1))
def test_sealed_members_come_back(members: dict[str, object]) -> None:
    raw = seal(members)
    read = unseal(raw, KEY)
    assert list(read) == ["digest", *members]
    assert read.pop("digest") == digest_of(raw) == hashlib.sha256(b"{" + raw[76 + 1 :]).hexdigest()
    assert read == members


def test_the_digest_stands_first_and_covers_the_object_without_it() -> None:
    raw = seal({"format": 1, "seq": 7})
    rest = b'"format":1,"seq":7}'
    assert raw == b'{"digest":"' + hashlib.sha256(b"{" + rest).hexdigest().encode() + b'",' + rest
    assert unseal(memoryview(raw), KEY) == json.loads(raw)


def test_any_flipped_bit_is_found() -> None:
    raw = seal({"format": 1, "seq": 7})
    for position in range(len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= 1
        with pytest.raises(CorruptionError) as caught:
            unseal(bytes(damaged), KEY)
        assert caught.value.key == KEY


def test_a_digest_mismatch_says_what_was_expected_and_found() -> None:
    raw = seal({"format": 1, "seq": 7})
    with pytest.raises(CorruptionError, match="digest") as caught:
        unseal(raw.replace(b'"seq":7', b'"seq":8'), KEY)
    assert caught.value.expected == digest_of(raw)
    assert caught.value.found == hashlib.sha256(b'{"format":1,"seq":8}').hexdigest()


@pytest.mark.parametrize("length", [0, 1, 11, 75, 76, 77, 90])
def test_a_truncated_object_is_corrupt(length: int) -> None:
    with pytest.raises(CorruptionError):
        unseal(seal({"format": 1, "seq": 7})[:length], KEY)


@pytest.mark.parametrize(
    "rest",
    [
        b'"a":1,"a":1}',
        b'"a":{"b":1,"b":2}}',
        b'"digest":"%s"}' % (b"0" * 64),
        b'"a":NaN}',
        b'"a":-Infinity}',
        b'"a":1',
        b'"a":1}x',
        b"}",
        b'"a":"\xff"}',
        b'"a":"\n"}',
        b'"a":' + b"9" * 5000 + b"}",
        b'"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'"a":' + b'{"b":' * 100_000 + b"1" + b"}" * 100_001,
        b'"a":' + b"[" * 64 + b"]" * 64 + b"}",
        b'"format":0}',
        b'"format":"1"}',
        b'"format":true}',
        b'"format":1.0}',
        b'"format":null}',
    ],
    ids=lambda rest: rest[:24].decode("ascii", "replace"),
)
def test_a_right_digest_over_wrong_json_is_corrupt(rest: bytes) -> None:
    with pytest.raises(CorruptionError) as caught:
        unseal(sealed_by_hand(rest), KEY)
    assert caught.value.key == KEY


def test_bytes_that_look_like_utf16_are_not_guessed_at() -> None:
    with pytest.raises(CorruptionError):
        unseal('{"digest":"'.encode("utf-16-le") + b"0" * 100, KEY)


@pytest.mark.parametrize("version", [b"2", b"99999999999999999999"])
def test_a_newer_format_is_no_corruption(version: bytes) -> None:
    with pytest.raises(FormatError, match="upgrade"):
        unseal(sealed_by_hand(b'"format":' + version + b"}"), KEY)


def test_nesting_up_to_the_limit_is_read_whatever_strings_contain() -> None:
    deepest: object = 'a string of [[[[ {{{{ and \\" ]] with "quotes" \\'
    for _ in range(sealed.MAX_DEPTH - 1):
        deepest = [deepest]
    raw = seal({"a": deepest, "b": "[" * 1000, "c": "\\", "d": '"[[['})
    assert unseal(raw, KEY)["a"] == deepest
    with pytest.raises(ValueError, match="deeper"):
        seal({"a": [deepest]})


STRUCTURE = st.text(alphabet='"\\[]{}:,n', max_size=12)


@settings(max_examples=200, deadline=None, database=None)
@given(st.dictionaries(STRUCTURE, st.lists(STRUCTURE, max_size=2) | st.dictionaries(STRUCTURE, STRUCTURE, max_size=2)))
def test_a_name_that_occurs_twice_is_found_whatever_strings_contain(members: dict[str, object]) -> None:
    body = json.dumps({"a": 1, "b": members}).encode()
    assert unseal(sealed_by_hand(body[1:]), KEY)["b"] == members
    with pytest.raises(CorruptionError, match="twice"):
        unseal(sealed_by_hand(b'"a":1,' + body[1:]), KEY)


def test_more_bytes_than_the_limit_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = seal({"a": "x" * 100})
    monkeypatch.setattr(sealed, "MAX_BYTES", len(raw) - 1)
    with pytest.raises(CorruptionError, match="too large"):
        unseal(raw, KEY)
    with pytest.raises(ValueError, match="refuse more"):
        seal({"a": "x" * 100})


def test_strings_of_escapes_cost_no_memory_beyond_their_size() -> None:
    rest = b'"a":"' + b"\\n" * 500_000 + b'","b":[' + b"[]," * 100 + b"[]]}"
    raw = sealed_by_hand(rest)
    tracemalloc.start()
    try:
        unseal(raw, KEY)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(raw)


@pytest.mark.parametrize("members", [{}, {"digest": "0" * 64}, {"a": float("nan")}, {"a": float("inf")}])
def test_what_cannot_be_sealed_is_refused(members: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        seal(members)


def test_only_a_sealed_object_has_a_digest() -> None:
    with pytest.raises(ValueError, match="not a sealed object"):
        digest_of(b'{"format":1}')
