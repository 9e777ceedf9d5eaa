"""Keys: builders and parser are inverses, and nothing else is a key."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from incremental_ckpt.format import layout
from incremental_ckpt.format.layout import ParsedKey, parse_key

IDS = st.binary(min_size=8, max_size=8).map(bytes.hex)
SEQS = st.integers(1, layout.MAX_NUMBER)
NUMBERS = st.integers(0, layout.MAX_NUMBER)
A = "0123456789abcdef"


def test_keys_are_spelled_as_the_format_says() -> None:
    assert layout.manifest_key(42) == "manifests/00000042.json"
    assert layout.base_key(42) == "manifests/00000042.base.json"
    assert layout.gone_key(42) == "manifests/00000042.gone.json"
    assert layout.resume_key(A, 3) == f"resumes/{A}-3.json"
    assert layout.attempt_prefix(42, A) == f"data/00000042-{A}/"
    assert layout.rank_manifest_key(42, A, 17) == f"data/00000042-{A}/rank-00017.json"
    assert layout.pack_key(42, A, 17, 3) == f"data/00000042-{A}/rank-00017-0003.safetensors"
    assert layout.outcome_key(42, A) == f"data/00000042-{A}/outcome.json"
    assert layout.manifest_key(123_456_789) == "manifests/123456789.json"


@settings(max_examples=60, deadline=None, database=None)
@given(seq=SEQS, attempt=IDS, job=IDS, rank=NUMBERS, index=NUMBERS, n=NUMBERS)
def test_parse_key_inverts_every_builder(seq: int, attempt: str, job: str, rank: int, index: int, n: int) -> None:
    built = {
        layout.REPO: ParsedKey("repo"),
        layout.manifest_key(seq): ParsedKey("manifest", seq=seq),
        layout.base_key(seq): ParsedKey("base", seq=seq),
        layout.gone_key(seq): ParsedKey("gone", seq=seq),
        layout.resume_key(job, n): ParsedKey("resume", job=job, n=n),
        layout.rank_manifest_key(seq, attempt, rank): ParsedKey("rank", seq=seq, attempt=attempt, rank=rank),
        layout.pack_key(seq, attempt, rank, index): ParsedKey("pack", seq=seq, attempt=attempt, rank=rank, index=index),
        layout.outcome_key(seq, attempt): ParsedKey("outcome", seq=seq, attempt=attempt),
    }
    for key, parsed in built.items():
        assert parse_key(key) == parsed


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/repo.json",
        "repo.json\n",
        "REPO.JSON",
        "manifests/",
        "manifests/42.json",
        "manifests/000000042.json",
        "manifests/00000000.json",
        "manifests/00000042.json/",
        "manifests/00000042.other.json",
        "manifests/../manifests/00000042.json",
        "manifests/0000004².json",
        "manifests/٠٠٠٠٠٠٤٢.json",
        "manifests/99999999999999999999.json",
        "manifests/9999999999999999999.json",
        f"resumes/{A}-03.json",
        f"resumes/{A}-.json",
        f"resumes/{A.upper()}-3.json",
        f"resumes/../{A}-3.json",
        f"data/00000042-{A}/../../secret",
        f"data/00000042-{A}/rank-00000.json/../x",
        f"data/00000042-{A}/rank-0.json",
        f"data/00000042-{A}/rank-000000.json",
        f"data/00000042-{A}/rank-00000-0.safetensors",
        f"data/00000042-{A}/rank-00000-0000.safetensors.tmp",
        f"data/00000042-{A[:-1]}/outcome.json",
        f"data/00000000-{A}/outcome.json",
        f"data//00000042-{A}/outcome.json",
        f"/data/00000042-{A}/outcome.json",
        "1" * 100_000,
    ],
)
def test_a_key_of_no_known_form_is_none(key: str) -> None:
    assert parse_key(key) is None


@settings(max_examples=200, deadline=None, database=None)
@given(st.from_regex(r"(manifests|resumes|data)/[0-9a-f.-]{1,24}(/[a-z0-9.-]{1,24})?(\.json|\.safetensors)?"))
@example("manifests/00000007.gone.json")
def test_whatever_parses_is_the_one_spelling_of_its_key(key: str) -> None:
    parsed = parse_key(key)
    if parsed is not None:
        assert parsed.what in ("manifest", "base", "gone", "resume", "rank", "pack", "outcome")
        assert parse_key(key.strip()) == parsed
        assert key == key.strip()


@pytest.mark.parametrize(
    "build",
    [
        lambda: layout.manifest_key(0),
        lambda: layout.manifest_key(-1),
        lambda: layout.manifest_key(2**63),
        lambda: layout.resume_key("../../etc", 1),
        lambda: layout.resume_key(A, -1),
        lambda: layout.attempt_prefix(1, A.upper()),
        lambda: layout.attempt_prefix(1, A + "\n"),
        lambda: layout.rank_manifest_key(1, A, -1),
        lambda: layout.pack_key(1, A, 0, -1),
    ],
)
def test_builders_refuse_what_would_not_parse(build) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="cannot be in a key"):
        build()


def test_new_ids_are_16_hex_digits_from_the_given_randomness() -> None:
    assert layout.new_id(lambda n: bytes(range(n))) == "0001020304050607"
    first, second = layout.new_id(), layout.new_id()
    assert first != second
    assert parse_key(layout.attempt_prefix(1, first) + "outcome.json") is not None
