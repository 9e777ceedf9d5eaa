"""What stands behind ``ickpt check``: damage, silence and a prune told apart, and every object read once."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from incremental_ckpt import Repository, open_store
from incremental_ckpt.errors import StorageError
from incremental_ckpt.format.manifest import RankRef
from incremental_ckpt.format.sealed import digest_of, seal
from incremental_ckpt.repository.check import CheckReport, check_repository
from incremental_ckpt.testing import FaultStore, Op, Perform, TracingStore, fail, on


def gone(place: Path, seq: int) -> None:
    members = {"format": 1, "seq": seq, "created": "2026-01-31T12:00:00.000000Z"}
    (place / f"manifests/{seq:08d}.gone.json").write_bytes(seal(members))
    for attempt in place.glob(f"data/{seq:08d}-*"):
        shutil.rmtree(attempt)


def test_a_store_that_does_not_answer_is_an_error_and_no_damage(place: Path) -> None:
    store = FaultStore(open_store(place), fail(on("get", "data/*")))
    with pytest.raises(StorageError, match="no answer"):
        check_repository(Repository(store), deep=True)


def test_an_object_that_the_store_refuses_is_a_problem_of_its_checkpoint(place: Path) -> None:
    refuse = fail(on("get", "data/00000003-*.safetensors"), lambda op: StorageError("the device reports errors"))
    report = check_repository(Repository(FaultStore(open_store(place), refuse)), deep=False)
    assert (report.restorable, report.damaged) == ((1, 2), (3, 4))
    assert [p.what for p in report.problems] == ["the device reports errors"]


def test_a_prune_that_passes_meanwhile_is_no_damage(place: Path) -> None:
    def prune(op: Op, perform: Perform) -> object:
        if op.key.startswith("data/00000003-") and not (place / "manifests/00000004.gone.json").exists():
            gone(place, 4)
            gone(place, 3)
        return perform(op)

    report = check_repository(Repository(FaultStore(open_store(place), prune)), deep=True)
    assert (report.restorable, report.damaged, report.problems) == ((1, 2), (), ())


def test_damage_beside_a_trainer_that_goes_on_is_looked_at_once(place: Path) -> None:
    next(place.glob("data/00000002-*/*.safetensors")).unlink()
    listings = []

    def watch(op: Op, perform: Perform) -> object:
        if op.kind == "list" and op.key.startswith("manifests/"):
            listings.append(op)
        return perform(op)

    report = check_repository(Repository(FaultStore(open_store(place), watch)), deep=False)
    assert report.restorable == (1,)
    assert len(listings) == 2


def test_progress_tells_of_every_checkpoint_and_of_bytes_that_only_grow(place: Path) -> None:
    told: list[tuple[int, int, int]] = []
    report = check_repository(Repository(open_store(place)), deep=True, progress=lambda *state: told.append(state))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert {done for done, _, _ in told} == {0, 1, 2, 3, 4}
    assert {total for _, total, _ in told} == {4}
    assert [read for _, _, read in told] == sorted(read for _, _, read in told)
    assert told[-1] == (4, 4, report.bytes_read)
    assert sum(done == 0 for done, _, _ in told) > 5, "a large checkpoint moves the progress while it is read"


def test_no_object_of_a_chain_is_read_once_per_delta_on_it(place: Path) -> None:
    store = TracingStore(open_store(place))
    report = check_repository(Repository(store), deep=False)
    assert report.ok
    reads = Counter(t.op.key for t in store.trace if t.op.kind == "get")
    # Once for its packs, once for its rows, once more where all rows of a base are looked for.
    assert max(reads.values()) <= 3
    assert not [key for key in reads if "/00000002" in key and key.endswith(".safetensors") and reads[key] > 1]


def test_rows_that_nobody_carries_are_missed(place: Path) -> None:
    """A base whose rank manifest leaves rows out, under a whole delta."""
    repository = Repository(open_store(place))
    first = repository.manifest(1)
    rank = repository.rank_manifests(first)[0]
    shards = tuple(replace(s, entries=()) if s.shard.table == "items" else s for s in rank.shards)
    raw = replace(rank, shards=shards).to_bytes()
    path, manifest = place / first.ranks[0].key, place / first.key
    path.unlink()
    path.write_bytes(raw)
    manifest.unlink()
    ref = RankRef(first.ranks[0].key, len(raw), digest_of(raw))
    manifest.write_bytes(replace(first, ranks=(ref,)).to_bytes())
    for later in (2, 3, 4):
        gone(place, later)
    report: CheckReport = check_repository(Repository(open_store(place)), deep=False)
    assert report.damaged == (1,)
    assert {p.seq for p in report.problems} == {1}
    assert all("items" in p.what and "does not cover" in p.what for p in report.problems)
