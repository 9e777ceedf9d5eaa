"""The golden files: today's code writes the same bytes, and reads from them what was written."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import generate_format as golden
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import safetensors.numpy

from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import (
    Gone,
    Manifest,
    Outcome,
    RankManifest,
    RepoFile,
    Resume,
    ShardEntries,
    Span,
    State,
)
from incremental_ckpt.format.pack import checksum, read_header
from incremental_ckpt.format.replay import plan_reads
from incremental_ckpt.format.rowset import decode_rows
from incremental_ckpt.format.sealed import digest_of
from incremental_ckpt.format.tree import HostTensor, from_tree
from incremental_ckpt.model import CheckpointRef, Field

REPOSITORY = golden.GOLDEN / "repository"
DOCUMENTS: dict[str, Any] = {
    "repo": RepoFile,
    "manifest": Manifest,
    "base": Manifest,
    "gone": Gone,
    "resume": Resume,
    "rank": RankManifest,
    "outcome": Outcome,
}


def keys() -> list[str]:
    return sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.rglob("*") if path.is_file())


def load(key: str) -> bytes:
    return (REPOSITORY / key).read_bytes()


def manifest(seq: int) -> Manifest:
    return Manifest.from_bytes(load(layout.manifest_key(seq)), layout.manifest_key(seq))


def rank_manifests(of: Manifest) -> list[RankManifest]:
    read = []
    for ref in of.ranks:
        raw = load(ref.key)
        assert (len(raw), digest_of(raw)) == (ref.size, ref.digest)
        read.append(RankManifest.from_bytes(raw, ref.key))
    return read


def bytes_at(ranks: RankManifest, span: Span) -> bytes:
    raw = load(ranks.packs[span.pack].key)[span.begin : span.end]
    assert checksum(raw) == span.checksum
    return raw


def test_regenerating_gives_the_same_files() -> None:
    made = {f"repository/{key}": raw for key, raw in golden.objects().items()}
    made |= {f"rowsets/{name}": raw for name, raw in golden.row_sets().items()}
    kept = {
        path.relative_to(golden.GOLDEN).as_posix(): path.read_bytes()
        for path in golden.GOLDEN.rglob("*")
        if path.is_file()
    }
    assert sorted(made) == sorted(kept)
    assert [name for name in made if made[name] != kept[name]] == []


@pytest.mark.parametrize("key", keys())
def test_every_object_is_read_and_written_again_as_it_was(key: str) -> None:
    parsed = layout.parse_key(key)
    assert parsed is not None
    raw = load(key)
    if parsed.what == "pack":
        tensors = read_header(raw, key, len(raw))
        assert sorted(tensors) == sorted(name for name, _ in safetensors.deserialize(raw))
    else:
        assert DOCUMENTS[parsed.what].from_bytes(raw, key).to_bytes() == raw


@pytest.mark.parametrize("name", golden.ROW_SETS)
def test_row_sets_are_read_as_they_were(name: str) -> None:
    raw = (golden.GOLDEN / "rowsets" / f"{name}.roaring").read_bytes()
    ids = golden.ROW_SETS[name]
    np.testing.assert_array_equal(decode_rows(raw, count=len(ids), rows=2**41, key=name), ids)


def test_the_facts_of_the_manifests_are_those_written() -> None:
    base, middle, newest = map(manifest, (1, 2, 3))
    assert [(each.seq, each.step, each.kind) for each in (base, middle, newest)] == [
        (1, 1000, "base"),
        (2, 2000, "delta"),
        (3, 3000, "delta"),
    ]
    for child, parent in pairwise((newest, middle, base)):
        assert child.parent == CheckpointRef(parent.seq, digest_of(load(parent.key))) == parent.ref
    assert (base.parent, base.next_parent, newest.next_parent) == (None, None, middle.ref)
    assert (base.epoch, middle.epoch, base.loss, repr(newest.loss)) == (None, 0, 0.5, "nan")
    assert newest.metrics == {"auc": 0.75, "spikes": float("inf")}
    assert [(entry.job, entry.first, entry.resumed) for entry in newest.lineage] == [
        (golden.FIRST_JOB, 1, 0),
        (golden.SECOND_JOB, 3, 2),
    ]
    assert newest.created == golden.DAY[3]
    stored = sum(len(load(key)) for key in keys() if key.startswith(layout.attempt_prefix(3, newest.attempt)))
    assert newest.totals.bytes == stored - len(load(layout.outcome_key(3, newest.attempt)))


def test_the_small_documents_say_what_was_written() -> None:
    failed = layout.rank_manifest_key(3, golden.FAILED, 1)
    vote = RankManifest.from_bytes(load(failed), failed)
    outcome = layout.outcome_key(3, golden.FAILED)
    assert (vote.vote, vote.error) == ("failed", "rank 1: OSError: No space left on device")
    assert Outcome.from_bytes(load(outcome), outcome) == Outcome(3, golden.FAILED, False, vote.error)
    marker = layout.resume_key(golden.SECOND_JOB, 1)
    assert Resume.from_bytes(load(marker), marker) == Resume(golden.SECOND_JOB, 1, 2, 2, golden.DAY[3])
    assert Gone.from_bytes(load(layout.gone_key(1)), layout.gone_key(1)) == Gone(1, golden.DAY[4])
    assert RepoFile.from_bytes(load(layout.REPO), layout.REPO) == RepoFile(1, ())


def restored(chain: list[Manifest], field: str) -> npt.NDArray[np.float32]:
    """A field of the whole table, replayed along the chain (base first)."""
    links: list[list[ShardEntries]] = []
    owners: dict[int, RankManifest] = {}
    for each in chain:
        ranks = rank_manifests(each)
        links.append([part for rank in ranks for part in rank.shards])
        owners |= {id(part): rank for rank in ranks for part in rank.shards}

    def row_ids(link: int, part: ShardEntries, index: int) -> npt.NDArray[np.int64]:
        rowset = part.rowsets[index]
        raw = bytes_at(owners[id(part)], rowset.at)
        return decode_rows(raw, count=rowset.count, rows=part.shard.rows, key="pack")

    values = np.full((golden.TABLE_ROWS, golden.TABLE_COLS), np.nan, dtype=np.float32)
    for read in plan_reads(links, field, range(golden.TABLE_ROWS), range(golden.TABLE_COLS), row_ids):
        records = np.frombuffer(bytes_at(owners[id(read.shard_entries)], read.entry.at), dtype="<f4")
        values[read.rows, read.cols.start : read.cols.stop] = records.reshape(-1, read.entry.record // 4)[
            read.positions
        ]
    return values


@pytest.mark.parametrize("seq", [1, 2, 3])
def test_replaying_the_chain_gives_the_table(seq: int) -> None:
    chain = [manifest(link) for link in range(1, seq + 1)]
    np.testing.assert_array_equal(restored(chain, "weight"), golden.table(seq))
    np.testing.assert_array_equal(restored(chain, "sum"), -golden.table(seq))


def test_the_equivalent_base_gives_the_same_tables() -> None:
    key = layout.base_key(2)
    equivalent = Manifest.from_bytes(load(key), key)
    assert equivalent.of == manifest(2).ref.digest
    assert all(not rank.state for rank in rank_manifests(equivalent))
    np.testing.assert_array_equal(restored([equivalent], "weight"), golden.table(2))
    np.testing.assert_array_equal(restored([equivalent, manifest(3)], "sum"), -golden.table(3))
    assert rank_manifests(equivalent)[0].shards[0].shard.fields == (
        Field("weight", "float32", 2),
        Field("sum", "float32", 1),
    )


def spelled(value: Any) -> Any:
    """Values with their types, in a form that can be compared: tensors by their bytes, NaN by its name."""
    kind = type(value).__name__
    if isinstance(value, HostTensor):
        return kind, value.dtype, value.shape, bytes(value.data)
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return kind, [(spelled(name), spelled(member)) for name, member in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [spelled(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return kind, sorted(map(repr, value))
    return kind, repr(value)


def made(tag: str, value: Any) -> object:
    if tag == "$size":
        return type(golden.SIZE)(value)
    return type(golden.EVERY_KIND[tag[1:]])() if tag in ("$dtype", "$device") else pytest.fail(f"unknown {tag}")


def test_a_tree_of_every_kind_of_value_is_read_as_it_was() -> None:
    (ranks, _) = rank_manifests(manifest(3))
    (state,) = ranks.state
    tensors: list[object] = []
    for tensor in state.tensors:
        host = HostTensor(tensor.dtype, tensor.shape, memoryview(bytes_at(ranks, tensor.at)))
        by_numpy = tensor in (state.tensors[-1], state.tensors[-2])
        tensors.append(np.frombuffer(host.data, host.dtype).reshape(host.shape) if by_numpy else host)
    read: Any = from_tree(state.tree, tensors, key=ranks.key, make=made)
    assert isinstance(state, State)
    assert spelled(read) == spelled(golden.EVERY_KIND)
    assert read["tied"][0] is read["tensor"]
    assert set(_tags(state.tree)) == {
        "$int", "$float", "$complex", "$bytes", "$tuple", "$set", "$frozenset", "$dict", "$ordereddict", "$tensor",
        "$ndarray", "$scalar", "$size", "$dtype", "$device",
    }  # fmt: skip


def _tags(tree: Any) -> list[str]:
    if isinstance(tree, list):
        return [tag for each in tree for tag in _tags(each)]
    if isinstance(tree, dict):
        return [name for name in tree if name.startswith("$")] + [tag for each in tree.values() for tag in _tags(each)]
    return []


def test_the_packs_open_with_plain_safetensors() -> None:
    ranks = rank_manifests(manifest(1))
    assert ranks[0].packs[1].key.endswith("rank-00000-0001.safetensors")
    loaded = safetensors.numpy.load(load(ranks[1].packs[0].key))
    assert loaded["0.weight.1"].tolist() == [[3.0, 3.0], [4.0, 4.0], [5.0, 5.0]]
    for rank in ranks:
        for pack in rank.packs:
            raw = load(pack.key)
            assert len(raw) == pack.size
            assert checksum(raw[: pack.header_size]) == pack.header_checksum
