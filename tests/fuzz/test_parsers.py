"""Of every parser of the format only CorruptionError and FormatError come out, whatever goes in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsers import HONEST, PARSERS, SEALED, parse, sealed, unsealed

EXAMPLES = settings(max_examples=60, deadline=None, database=None)
INSERTED = (b"", b"\x00", b"\xff" * 8, b"-1", b"1e999", b"NaN", b"[", b"{", b'"', b",")
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([2**53, 2**63, -(2**63), 10**400]), st.floats(),
    st.text(max_size=6), st.sampled_from(["..", "/etc/passwd", "nan", "\ud800", "$tensor", "c" * 16]),
)  # fmt: skip
JSON = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


def test_every_parser_reads_what_is_honest() -> None:
    assert HONEST.keys() == PARSERS.keys()
    for name, raw in HONEST.items():
        assert parse(name, raw) is not None, name


@pytest.mark.parametrize("name", PARSERS)
@EXAMPLES
@given(raw=st.binary(max_size=300))
def test_any_bytes_are_refused_by_type(name: str, raw: bytes) -> None:
    parse(name, raw)
    if name in SEALED:
        parse(name, sealed(raw))


@st.composite
def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """Bytes flipped, cut, doubled, put in and taken from elsewhere."""
    for _ in range(draw(st.integers(1, 3))):
        a, b = sorted((draw(st.integers(0, len(raw))), draw(st.integers(0, len(raw)))))
        inserted = draw(st.sampled_from([*INSERTED, raw[a:b]]))
        raw = raw[:a] + inserted + raw[draw(st.sampled_from([a, min(a + 1, b), b])) :]
    return raw


@pytest.mark.parametrize("name", PARSERS)
@EXAMPLES
@given(data=st.data())
def test_what_was_honest_and_is_damaged_is_refused_by_type(name: str, data: st.DataObject) -> None:
    honest = HONEST[name]
    parse(name, data.draw(damaged(honest)))
    if name in SEALED:
        parse(name, sealed(data.draw(damaged(unsealed(honest)))))


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A document with anything in the place of one of its members, at any depth."""
    if isinstance(value, (dict, list)) and value and draw(st.integers(0, 9)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = draw(st.sampled_from(list(keys)))
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        if draw(st.integers(0, 9)):
            copy[key] = draw(changed(value[key]))
        else:
            del copy[key]
        return copy
    return draw(JSON)


@pytest.mark.parametrize("name", sorted(SEALED | {"tree"}))
@EXAMPLES
@given(data=st.data())
def test_any_member_may_be_anything(name: str, data: st.DataObject) -> None:
    honest = HONEST[name]
    members = json.loads(honest if name == "tree" else unsealed(honest))
    raw = json.dumps(data.draw(changed(members))).encode()
    parse(name, raw if name == "tree" else sealed(raw))
