"""Rank manifests: every span, key, count and size is checked before anything is read by it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from incremental_ckpt.errors import CorruptionError, FormatError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import (
    CODECS,
    Entry,
    Pack,
    RankManifest,
    RowSet,
    ShardEntries,
    Span,
    State,
    StateTensor,
)
from incremental_ckpt.format.sealed import seal, unseal
from incremental_ckpt.model import Field, Shard

ATTEMPT = "0123456789abcdef"
X = "f" * 16
HEADER = 64


def span(begin: int, size: int, pack: int = 0, tensor: str = "t") -> Span:
    return Span(pack, tensor, HEADER + begin, HEADER + begin + size, X)


SHARD = Shard("sparse.t_cat_2", 1000, 8, 500, 100, 4, 4, (Field("weight", "float32", 4), Field("sum", "float32", 1)))
PART = ShardEntries(
    SHARD,
    (RowSet(3, span(0, 30)),),
    (
        Entry("weight", "raw", 16, 0, span(30, 48)),
        Entry("sum", "raw", 4, 0, span(78, 12)),
        Entry("weight", "int8", 12, range(10, 20), span(90, 120)),
        Entry("sum", "raw", 4, range(10, 20), span(210, 40)),
    ),
)
STATE = State("dense", {"w": {"$tensor": 0}}, (StateTensor("float32", (5, 2), span(0, 40, pack=1)),))
MANIFEST = RankManifest(
    seq=42,
    attempt=ATTEMPT,
    rank=1,
    world_size=2,
    vote="ok",
    error="",
    packs=(
        Pack(layout.pack_key(42, ATTEMPT, 1, 0), HEADER + 250, HEADER, X),
        Pack(layout.pack_key(42, ATTEMPT, 1, 1), HEADER + 40, HEADER, X),
    ),
    shards=(PART, ShardEntries(replace(SHARD, row_start=0, rows=0), (), ())),
    state=(
        STATE,
        State("empty", None, (StateTensor("bool", (0, 3), span(0, 0)), StateTensor("int64", (), span(90, 8)))),
    ),
)
# The last tensor shares no byte with the int8 entry: it gets a place of its own.
MANIFEST = replace(
    MANIFEST,
    packs=(replace(MANIFEST.packs[0], size=HEADER + 258), MANIFEST.packs[1]),
    state=(
        STATE,
        replace(MANIFEST.state[1], tensors=(MANIFEST.state[1].tensors[0], StateTensor("int64", (), span(250, 8)))),
    ),
)
FAILED = replace(MANIFEST, vote="failed", error="OSError: No space left on device", shards=(), state=(), packs=())


@pytest.mark.parametrize("manifest", [MANIFEST, FAILED], ids=["ok", "failed"])
def test_a_rank_manifest_comes_back_from_its_key(manifest: RankManifest) -> None:
    raw = manifest.to_bytes()
    assert manifest.key == f"data/00000042-{ATTEMPT}/rank-00001.json"
    assert RankManifest.from_bytes(raw, manifest.key) == manifest
    with pytest.raises(CorruptionError, match="another key"):
        RankManifest.from_bytes(raw, layout.rank_manifest_key(42, ATTEMPT, 0))


def test_the_members_are_those_of_the_format() -> None:
    members = unseal(MANIFEST.to_bytes(), "k")
    assert members["packs"][0] == {
        "key": f"data/00000042-{ATTEMPT}/rank-00001-0000.safetensors",
        "size": HEADER + 258,
        "header": {"size": HEADER, "checksum": X},
    }
    shard = members["shards"][0]
    rowset = {"pack": 0, "tensor": "t", "begin": HEADER, "end": HEADER + 30, "checksum": X}
    assert shard["rowsets"] == [{"count": 3, "at": rowset}]
    assert [entry["rows"] for entry in shard["entries"]] == [{"set": 0}] * 2 + [{"range": [10, 20]}] * 2
    assert shard["fields"][1] == {"name": "sum", "dtype": "float32", "width": 1}
    assert members["state"][0]["tensors"][0]["shape"] == [5, 2]
    assert (members["vote"], members["rank"], members["world_size"]) == ("ok", 1, 2)


def test_rows_of_an_entry_are_counted_from_its_range_or_row_set() -> None:
    assert [PART.row_count(entry) for entry in PART.entries] == [3, 3, 10, 10]


def test_spans_may_be_shared_as_a_whole() -> None:
    tied = replace(PART, entries=(*PART.entries, PART.entries[0], PART.entries[1]))
    manifest = replace(MANIFEST, shards=(tied,))
    assert RankManifest.from_bytes(manifest.to_bytes(), manifest.key) == manifest


def shard0(members: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = members["shards"][0]
    return found


def entry0(members: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = members["shards"][0]["entries"][0]
    return found


def tensor0(members: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = members["state"][0]["tensors"][0]
    return found


Change = Callable[[dict[str, Any]], object]
MALFORMED: list[Change] = [
    lambda m: m.update(rank=2),
    lambda m: m.update(rank=-1),
    lambda m: m.update(world_size=0),
    lambda m: m.update(vote="maybe"),
    lambda m: m.update(vote=True),
    lambda m: m.update(vote="failed"),
    lambda m: m.update(error=None),
    lambda m: m.update(packs=None),
    lambda m: m.update(packs=[]),
    lambda m: m.update(packs=m["packs"][:1]),
    lambda m: m.update(packs=m["packs"][:1] * 2),
    lambda m: m["packs"][0].update(key="../../../etc/passwd"),
    lambda m: m["packs"][0].update(key=f"data/00000041-{ATTEMPT}/rank-00001-0000.safetensors"),
    lambda m: m["packs"][0].update(key=f"data/00000042-{ATTEMPT}/rank-00000-0000.safetensors"),
    lambda m: m["packs"][0].update(key=f"data/00000042-{ATTEMPT}/rank-00001.json"),
    lambda m: m["packs"][0].update(size=float("1e30")),
    lambda m: m["packs"][0].update(size=HEADER + 200),
    lambda m: m["packs"][0]["header"].update(size=HEADER + 1),
    lambda m: m["packs"][0]["header"].update(size=2**40),
    lambda m: m["packs"][0]["header"].update(size=0),
    lambda m: m["packs"][0]["header"].update(checksum="f" * 15),
    lambda m: m["packs"][0]["header"].update(checksum="F" * 16),
    lambda m: m.update(shards=[[]]),
    lambda m: shard0(m).update(table=""),
    lambda m: shard0(m).update(table=3),
    lambda m: shard0(m).update(table_rows=599),
    lambda m: shard0(m).update(table_rows=2**63),
    lambda m: shard0(m).update(table_cols=7),
    lambda m: shard0(m).update(table_cols=0),
    lambda m: shard0(m).update(cols=0),
    lambda m: shard0(m).update(rows=501),
    lambda m: shard0(m).update(rows=-1),
    lambda m: shard0(m).update(rows=2),
    lambda m: shard0(m).update(row_start=-1),
    lambda m: shard0(m).update(row_start=950),
    lambda m: shard0(m).update(fields=[]),
    lambda m: shard0(m).update(fields=[{"name": "weight", "dtype": "float32", "width": 4}]),
    lambda m: shard0(m)["fields"][1].update(name="weight"),
    lambda m: shard0(m)["fields"][0].update(width=0),
    lambda m: shard0(m)["fields"][0].update(width=5),
    lambda m: shard0(m)["fields"][0].update(dtype="float64"),
    lambda m: shard0(m)["fields"][0].update(dtype=None),
    lambda m: shard0(m)["rowsets"][0].update(count=101),
    lambda m: shard0(m)["rowsets"][0].update(count=2),
    lambda m: shard0(m)["rowsets"][0].update(at=None),
    lambda m: shard0(m)["rowsets"].clear(),
    lambda m: entry0(m).update(field="momentum9"),
    lambda m: entry0(m).update(codec=None),
    lambda m: entry0(m).update(record=0),
    lambda m: entry0(m).update(record=15),
    lambda m: entry0(m).update(record=2**62),
    lambda m: entry0(m).update(rows=None),
    lambda m: entry0(m).update(rows={}),
    lambda m: entry0(m).update(rows={"set": 0, "range": [0, 3]}),
    lambda m: entry0(m).update(rows={"set": 1}),
    lambda m: entry0(m).update(rows={"set": -1}),
    lambda m: entry0(m).update(rows={"range": [3]}),
    lambda m: entry0(m).update(rows={"range": [3, 0]}),
    lambda m: entry0(m).update(rows={"range": [98, 101]}),
    lambda m: entry0(m).update(rows={"range": [-3, 0]}),
    lambda m: entry0(m).update(rows={"range": [0, 3.0]}),
    lambda m: entry0(m)["at"].update(pack=2),
    lambda m: entry0(m)["at"].update(pack=-1),
    lambda m: entry0(m)["at"].update(tensor=None),
    lambda m: entry0(m)["at"].update(end=HEADER + 79),
    lambda m: entry0(m)["at"].update(begin=HEADER + 1000, end=HEADER + 1048),
    lambda m: entry0(m)["at"].update(begin=HEADER + 20, end=HEADER + 68),
    lambda m: entry0(m)["at"].update(begin=0, end=48),
    lambda m: entry0(m)["at"].update(begin=100, end=52),
    lambda m: entry0(m)["at"].update(checksum="xyz"),
    lambda m: entry0(m)["at"].update(checksum="f" * 17),
    lambda m: m["state"][0].pop("tree"),
    lambda m: m["state"][0].update(name=""),
    lambda m: m["state"][1].update(name="dense"),
    lambda m: tensor0(m).update(shape=[5, 3]),
    lambda m: tensor0(m).update(shape=[5, -2]),
    lambda m: tensor0(m).update(shape=[True, 10]),
    lambda m: tensor0(m).update(shape="5,2"),
    lambda m: tensor0(m).update(shape=[1] * 40 + [5, 2]),
    lambda m: tensor0(m).update(shape=[2**62, 2**62, 0], at={**tensor0(m)["at"], "end": HEADER}),
]


def changed(change: Change) -> bytes:
    members = json.loads(MANIFEST.to_bytes())
    del members["digest"]
    change(members)
    return seal(members)


@pytest.mark.parametrize("change", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_rank_manifest_is_corrupt(change: Change) -> None:
    with pytest.raises(CorruptionError) as caught:
        RankManifest.from_bytes(changed(change), MANIFEST.key)
    assert caught.value.key == MANIFEST.key
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("shards[1].row_start", lambda m: m["shards"][1].update(row_start=-1)),
        ("shards[1].cols", lambda m: m["shards"][1].pop("cols")),
        ("shards[1].fields[0].name", lambda m: m["shards"][1]["fields"][0].update(name="")),
        ("shards[1].fields[1].width", lambda m: m["shards"][1]["fields"][1].update(width=True)),
        ("shards[0].rowsets[0].at", lambda m: shard0(m)["rowsets"][0].update(at=7)),
        ("shards[0].entries[2]", lambda m: shard0(m)["entries"].__setitem__(2, [])),
        ("shards[0].entries[2].at.end", lambda m: shard0(m)["entries"][2]["at"].update(end=1)),
        ("shards[0].entries[3].at.checksum", lambda m: shard0(m)["entries"][3]["at"].update(checksum="é" * 16)),
        ("shards[0].entries[3].rows.range[1]", lambda m: shard0(m)["entries"][3]["rows"].update(range=[0, 101])),
        ("shards[0].entries[1].rows.set", lambda m: shard0(m)["entries"][1]["rows"].update(set=1)),
        ("state[1].tensors[1].at.pack", lambda m: m["state"][1]["tensors"][1]["at"].update(pack="0")),
    ],
)
def test_what_is_refused_is_named_by_its_place(place: str, change: Change) -> None:
    with pytest.raises(CorruptionError, match=re.escape(f"{place} is ")):
        RankManifest.from_bytes(changed(change), MANIFEST.key)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_known_codecs_are_read(codec: str) -> None:
    record = 16 if codec == "raw" else 12
    at = span(90, record * 10)
    manifest = replace(
        MANIFEST, shards=(ShardEntries(SHARD, (), (Entry("weight", codec, record, range(10, 20), at),)),)
    )
    manifest = replace(manifest, state=())
    assert RankManifest.from_bytes(manifest.to_bytes(), manifest.key) == manifest


def test_a_codec_or_dtype_of_a_later_version_is_refused_as_such() -> None:
    with pytest.raises(FormatError, match="'int1'"):
        RankManifest.from_bytes(changed(lambda m: entry0(m).update(codec="int1")), MANIFEST.key)
    with pytest.raises(FormatError, match="'float4'"):
        RankManifest.from_bytes(changed(lambda m: tensor0(m).update(dtype="float4")), MANIFEST.key)


def test_an_unknown_state_name_is_handed_to_the_caller() -> None:
    read = RankManifest.from_bytes(changed(lambda m: m["state"][0].update(name="novelty")), MANIFEST.key)
    assert read.state[0].name == "novelty"


def test_what_could_not_be_read_is_not_written() -> None:
    with pytest.raises(ValueError, match="step 1"):
        entry = replace(PART.entries[2], rows=range(0, 20, 2))
        replace(MANIFEST, shards=(replace(PART, entries=(entry,)),)).to_bytes()
    with pytest.raises(ValueError, match="failed vote"):
        replace(MANIFEST, vote="failed").to_bytes()
    with pytest.raises(ValueError, match="overlap"):
        entry = replace(PART.entries[1], at=span(70, 12))
        replace(MANIFEST, shards=(replace(PART, entries=(PART.entries[0], entry)),)).to_bytes()


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)


@settings(max_examples=200, deadline=None, database=None)
@given(data=st.data())
def test_junk_anywhere_gives_a_rank_manifest_or_a_typed_error(data: st.DataObject) -> None:
    members = json.loads(MANIFEST.to_bytes())
    del members["digest"]
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = members
        while True:
            names = list(place) if isinstance(place, dict) else list(range(len(place)))
            name = data.draw(st.sampled_from(names))
            if isinstance(place[name], (dict, list)) and place[name] and data.draw(st.integers(0, 4)):
                place = place[name]
                continue
            place[name] = data.draw(JUNK)
            break
    try:
        read = RankManifest.from_bytes(seal(members), MANIFEST.key)
    except (CorruptionError, FormatError):
        return
    assert RankManifest.from_bytes(read.to_bytes(), read.key) == read
    for part in read.shards:
        for entry in part.entries:
            pack = read.packs[entry.at.pack]
            assert pack.header_size <= entry.at.begin <= entry.at.end <= pack.size
            assert part.row_count(entry) * entry.record == entry.at.size
