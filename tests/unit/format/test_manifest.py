"""Manifests and the small documents: what is written is read back, and nothing malformed is believed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from incremental_ckpt.errors import CorruptionError, FormatError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import (
    Gone,
    Lineage,
    Manifest,
    Outcome,
    RankRef,
    RepoFile,
    Resume,
    Totals,
    ancestors,
    owner,
)
from incremental_ckpt.format.sealed import digest_of, seal, unseal
from incremental_ckpt.model import CheckpointRef

JOB, OLD_JOB, ATTEMPT, OTHER = "0" * 15 + "a", "0" * 15 + "b", "0" * 15 + "c", "0" * 15 + "d"
D1, D2 = "1" * 64, "2" * 64
CREATED = datetime(2026, 1, 31, 12, 0, 0, 250, tzinfo=UTC)


def manifest(**changes: Any) -> Manifest:
    facts: dict[str, Any] = {
        "seq": 42,
        "step": 42000,
        "epoch": 3,
        "loss": 0.45,
        "metrics": {"auc": 0.79},
        "kind": "delta",
        "parent": CheckpointRef(41, D1),
        "next_parent": None,
        "job": JOB,
        "attempt": ATTEMPT,
        "lineage": (Lineage(OLD_JOB, 1, 0), Lineage(JOB, 30, 29)),
        "created": CREATED,
        "world_size": 2,
        "ranks": tuple(RankRef(layout.rank_manifest_key(42, ATTEMPT, rank), 1234, D2) for rank in range(2)),
        "totals": Totals(211_000, 10_570_000, 56_000_000),
        "environment": {"torch": "2.13.0", "threads": 2},
    }
    return Manifest(**{**facts, **changes})


def equivalent(**changes: Any) -> Manifest:
    ranks = tuple(RankRef(layout.rank_manifest_key(42, attempt, 0), 99, D2) for attempt in (OTHER, ATTEMPT))
    return manifest(**{"kind": "base", "parent": None, "of": D1, "ranks": ranks, "world_size": 1, **changes})


DOCUMENTS = [
    manifest(),
    manifest(kind="base", parent=None),
    manifest(next_parent=CheckpointRef(30, D2), epoch=None, loss=None, metrics={}),
    equivalent(),
    Resume(JOB, 2, 41, 42, CREATED),
    Outcome(42, ATTEMPT, True, ""),
    Outcome(42, ATTEMPT, False, "rank 1: No space left on device"),
    Gone(42, CREATED),
    RepoFile(1, ()),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: type(document).__name__)
def test_a_document_comes_back_from_its_key(document: Any) -> None:
    raw = document.to_bytes()
    assert type(document).from_bytes(raw, document.key) == document
    assert type(document).from_bytes(raw, document.key).to_bytes() == raw
    assert layout.parse_key(document.key) is not None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: type(document).__name__)
@pytest.mark.parametrize("key", ["manifests/00000043.json", f"data/00000042-{ATTEMPT}/rank-00000.json", "elsewhere"])
def test_a_document_under_another_key_is_corrupt(document: Any, key: str) -> None:
    with pytest.raises(CorruptionError) as caught:
        type(document).from_bytes(document.to_bytes(), key)
    assert (caught.value.key, caught.value.found) == (key, document.key)


def test_a_manifest_that_was_read_knows_its_digest() -> None:
    raw = manifest().to_bytes()
    read = Manifest.from_bytes(raw, manifest().key)
    assert read.ref == CheckpointRef(42, digest_of(raw))
    assert read == manifest()
    with pytest.raises(ValueError, match="no digest"):
        _ = manifest().ref


def test_the_members_are_those_of_the_format() -> None:
    members = unseal(manifest().to_bytes(), "k")
    del members["digest"]
    assert members == {
        "format": 1,
        "seq": 42,
        "step": 42000,
        "epoch": 3,
        "loss": 0.45,
        "metrics": {"auc": 0.79},
        "kind": "delta",
        "parent": {"seq": 41, "digest": D1},
        "next_parent": None,
        "job": JOB,
        "attempt": ATTEMPT,
        "lineage": [{"job": OLD_JOB, "first": 1, "resumed": 0}, {"job": JOB, "first": 30, "resumed": 29}],
        "created": "2026-01-31T12:00:00.000250Z",
        "world_size": 2,
        "ranks": [
            {"key": f"data/00000042-{ATTEMPT}/rank-0000{rank}.json", "size": 1234, "digest": D2} for rank in range(2)
        ],
        "totals": {"rows": 211_000, "table_rows": 10_570_000, "bytes": 56_000_000},
        "environment": {"torch": "2.13.0", "threads": 2},
    }
    assert unseal(equivalent().to_bytes(), "k")["of"] == D1


def test_info_tells_the_facts_of_the_checkpoint() -> None:
    info = manifest().info()
    assert (info.seq, info.step, info.epoch, info.loss, info.metrics) == (42, 42000, 3, 0.45, {"auc": 0.79})
    assert (info.kind, info.parent, info.rows, info.table_rows, info.bytes) == (
        "delta",
        41,
        211_000,
        10_570_000,
        56_000_000,
    )
    assert (info.created, info.job, info.attempt, info.world_size) == (CREATED, JOB, ATTEMPT, 2)
    assert manifest(kind="base", parent=None).info().parent is None


@settings(max_examples=60, deadline=None, database=None)
@given(
    loss=st.none() | st.floats(),
    metrics=st.dictionaries(st.text(max_size=5), st.floats() | st.integers(-(2**53), 2**53), max_size=4),
    step=st.integers(0, 2**63 - 1),
)
def test_losses_and_metrics_come_back_whatever_float_they_are(
    loss: float | None, metrics: dict[str, float], step: int
) -> None:
    written = manifest(loss=loss, metrics=metrics, step=step)
    read = Manifest.from_bytes(written.to_bytes(), written.key)
    assert repr(read.loss) == repr(loss)
    assert {name: repr(value) for name, value in read.metrics.items()} == {
        name: repr(float(value)) for name, value in metrics.items()
    }
    assert read.step == step


def test_times_are_written_in_utc_whatever_zone_they_are_in() -> None:
    east = CREATED.astimezone(timezone(timedelta(hours=9)))
    assert Gone(1, east).to_bytes() == Gone(1, CREATED).to_bytes()
    with pytest.raises(ValueError, match="no time zone"):
        Gone(1, CREATED.replace(tzinfo=None)).to_bytes()


def test_an_environment_of_odd_floats_and_sequences_is_written_as_json() -> None:
    raw = manifest(environment={"nan": math.nan, "versions": (1, 2), "nested": {"inf": [math.inf]}}).to_bytes()
    assert Manifest.from_bytes(raw, manifest().key).environment == {
        "nan": {"$float": "nan"},
        "versions": [1, 2],
        "nested": {"inf": [{"$float": "inf"}]},
    }


def test_members_that_a_reader_does_not_know_are_ignored() -> None:
    members = unseal(manifest().to_bytes(), "k")
    del members["digest"]
    members["novelty"] = {"deep": [1]}
    members["totals"]["novelty"] = 3
    assert Manifest.from_bytes(seal(members), manifest().key) == manifest()


Change = Callable[[dict[str, Any]], object]
MALFORMED: list[Change] = [
    lambda m: m.pop("seq"),
    lambda m: m.pop("format"),
    lambda m: m.update(seq=-1),
    lambda m: m.update(seq=42.0),
    lambda m: m.update(seq=True),
    lambda m: m.update(seq="42"),
    lambda m: m.update(seq=2**63),
    lambda m: m.update(seq=10**300),
    lambda m: m.update(step=None),
    lambda m: m.update(step=True),
    lambda m: m.update(epoch=False),
    lambda m: m.update(step=10**300),
    lambda m: m.update(loss="0.45"),
    lambda m: m.update(loss={"$float": "huge"}),
    lambda m: m.update(loss={"$float": ["nan"]}),
    lambda m: m.update(loss=10**400),
    lambda m: m.update(loss=True),
    lambda m: m.update(metrics=[]),
    lambda m: m.update(metrics={"auc": None}),
    lambda m: m.update(kind="full"),
    lambda m: m.update(kind=["delta"]),
    lambda m: m.update(kind="base"),
    lambda m: m.update(parent=None),
    lambda m: m.update(parent={"seq": 42, "digest": D1}),
    lambda m: m.update(parent={"seq": 0, "digest": D1}),
    lambda m: m.update(parent={"seq": 41, "digest": D1.upper().replace("1", "A")}),
    lambda m: m.update(parent={"seq": 41, "digest": D1[1:]}),
    lambda m: m.update(parent=[41, D1]),
    lambda m: m.update(next_parent={"seq": 42, "digest": D1}),
    lambda m: m.pop("next_parent"),
    lambda m: m.update(job="../../../etc/pass"),
    lambda m: m.update(attempt=ATTEMPT + "\n"),
    lambda m: m.update(attempt=OTHER),
    lambda m: m.update(lineage=[]),
    lambda m: m.update(lineage={}),
    lambda m: m.update(lineage=[{"job": JOB, "first": 2, "resumed": 1}]),
    lambda m: m.update(lineage=[{"job": JOB, "first": 1, "resumed": 1}]),
    lambda m: m.update(lineage=[{"job": OLD_JOB, "first": 1, "resumed": 0}]),
    lambda m: m["lineage"].append({"job": JOB, "first": 30, "resumed": 3}),
    lambda m: m["lineage"].append({"job": JOB, "first": 43, "resumed": 3}),
    lambda m: m.update(created="2026-01-31T12:00:00Z"),
    lambda m: m.update(created="2026-02-31T12:00:00.000000Z"),
    lambda m: m.update(created="2026-01-31T12:00:00.000000+00:00"),
    lambda m: m.update(created=1_769_860_800),
    lambda m: m.update(world_size=0),
    lambda m: m.update(world_size=3),
    lambda m: m.update(ranks=m["ranks"][::-1]),
    lambda m: m.update(ranks=m["ranks"][:1] * 2),
    lambda m: m.update(ranks=[None, None]),
    lambda m: m["ranks"][0].update(key="../../etc/passwd"),
    lambda m: m["ranks"][0].update(key="repo.json"),
    lambda m: m["ranks"][0].update(key=f"data/00000041-{ATTEMPT}/rank-00000.json"),
    lambda m: m["ranks"][0].update(key=f"data/00000042-{OTHER}/rank-00000.json"),
    lambda m: m["ranks"][0].update(size=-1),
    lambda m: m["ranks"][0].update(size=1e300),
    lambda m: m["ranks"][0].update(digest=""),
    lambda m: m.update(totals=None),
    lambda m: m["totals"].update(rows=-1),
    lambda m: m["totals"].pop("bytes"),
    lambda m: m.update(environment=None),
    lambda m: m.update(of=D1),
    lambda m: m.update(of=None),
]


@pytest.mark.parametrize("change", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_manifest_is_corrupt(change: Change) -> None:
    members = unseal(manifest().to_bytes(), "k")
    del members["digest"]
    change(members)
    with pytest.raises(CorruptionError) as caught:
        Manifest.from_bytes(seal(members), manifest().key)
    assert caught.value.key == manifest().key
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("document", "change"),
    [
        (Resume(JOB, 2, 41, 42, CREATED), {"seq": 43}),
        (Resume(JOB, 2, 41, 42, CREATED), {"n": -1}),
        (Resume(JOB, 2, 41, 42, CREATED), {"job": "x"}),
        (Outcome(42, ATTEMPT, True, ""), {"committed": 1}),
        (Outcome(42, ATTEMPT, True, ""), {"error": None}),
        (Gone(42, CREATED), {"created": None}),
        (Gone(42, CREATED), {"seq": 0}),
        (RepoFile(1, ()), {"features": {}}),
        (RepoFile(1, ()), {"features": [1]}),
    ],
)
def test_a_malformed_small_document_is_corrupt(document: Any, change: dict[str, Any]) -> None:
    members = unseal(document.to_bytes(), "k")
    del members["digest"]
    with pytest.raises(CorruptionError):
        type(document).from_bytes(seal({**members, **change}), document.key)


def test_an_unknown_feature_or_format_is_not_read() -> None:
    with pytest.raises(FormatError, match="'sharded-manifests'"):
        RepoFile.from_bytes(seal({"format": 1, "features": ["sharded-manifests"]}), layout.REPO)
    with pytest.raises(FormatError, match="format 2"):
        RepoFile.from_bytes(seal({"format": 2, "features": [], "shape": "unknown"}), layout.REPO)
    with pytest.raises(ValueError, match="feature"):
        RepoFile(1, ("sharded-manifests",)).to_bytes()
    with pytest.raises(ValueError, match="format"):
        RepoFile(2, ()).to_bytes()


def test_an_equivalent_is_a_base_made_of_any_attempts_of_its_seq() -> None:
    assert equivalent().key == layout.base_key(42)
    with pytest.raises(ValueError, match="kind base"):
        equivalent(kind="delta", parent=CheckpointRef(41, D1)).to_bytes()
    with pytest.raises(ValueError, match="no rank manifest of seq 42"):
        equivalent(ranks=(RankRef(layout.rank_manifest_key(41, OTHER, 0), 9, D2),)).to_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": 0},
        {"parent": None},
        {"job": "trainer"},
        {"world_size": 1},
        {"lineage": ()},
        {"lineage": (Lineage(OLD_JOB, 1, 0),)},
        {"kind": "full"},
        {"parent": CheckpointRef(42, D1)},
    ],
)
def test_what_could_not_be_read_is_not_written(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        manifest(**changes).to_bytes()


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    # Made anew each time: what is drawn first may be changed by what is drawn next.
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [[]]),
    st.builds(lambda: {"seq": 1}),
)


@settings(max_examples=200, deadline=None, database=None)
@given(data=st.data())
def test_junk_anywhere_gives_a_manifest_or_a_typed_error(data: st.DataObject) -> None:
    members = json.loads(manifest().to_bytes())
    del members["digest"]
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = members
        while True:
            names = list(place) if isinstance(place, dict) else list(range(len(place)))
            name = data.draw(st.sampled_from(names))
            if isinstance(place[name], (dict, list)) and place[name] and data.draw(st.booleans()):
                place = place[name]
                continue
            place[name] = data.draw(JUNK)
            break
    try:
        read = Manifest.from_bytes(seal(members), manifest().key)
    except (CorruptionError, FormatError):
        return
    assert Manifest.from_bytes(read.to_bytes(), read.key) == read


def test_the_owner_of_a_seq_is_the_last_job_that_began_by_then() -> None:
    lineage = (Lineage("a", 1, 0), Lineage("b", 5, 3), Lineage("c", 8, 8 - 1))
    assert [owner(lineage, seq).job for seq in range(1, 10)] == list("aaaabbbcc")
    with pytest.raises(ValueError, match="before"):
        owner(lineage, 0)


def test_ancestors_follow_what_each_job_resumed_from() -> None:
    lineage = (Lineage("a", 1, 0), Lineage("b", 5, 3), Lineage("c", 8, 6))
    assert list(ancestors(lineage, 9)) == [9, 8, 6, 5, 3, 2, 1]
    assert list(ancestors(lineage, 7)) == [7, 6, 5, 3, 2, 1]
    assert list(ancestors(lineage, 4)) == [4, 3, 2, 1]
    assert list(ancestors((*lineage, Lineage("d", 10, 0)), 11)) == [11, 10]


def test_the_digest_of_a_manifest_is_that_of_its_bytes_without_the_member() -> None:
    raw = manifest().to_bytes()
    assert digest_of(raw) == hashlib.sha256(b"{" + raw.split(b",", 1)[1]).hexdigest()
    assert dataclasses.replace(manifest(), digest=D1).to_bytes() == raw
