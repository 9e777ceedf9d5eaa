"""What stands behind ``ickpt check``: damage, silence and a prune told apart, and every object read once."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from incremental_ckpt import Repository, open_store
from incremental_ckpt.compaction import compact
from incremental_ckpt.errors import StorageError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Gone, Outcome, RankRef
from incremental_ckpt.format.sealed import digest_of, seal
from incremental_ckpt.repository.check import CheckReport, check_repository
from incremental_ckpt.testing import FaultStore, Op, Perform, TracingStore, fail, on

Ickpt = Callable[..., Any]


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
    documents = {key: count for key, count in reads.items() if key.endswith(".json") and key != "repo.json"}
    assert len(documents) == 8
    assert max(documents.values()) == 1
    assert not [key for key in reads if "/00000002" in key and key.endswith(".safetensors") and reads[key] > 1]


@pytest.mark.parametrize(("lost", "damaged"), [(1, (2, 3, 4)), (2, (3, 4)), (3, (4,))])
def test_a_checkpoint_whose_manifest_is_gone_without_a_word_is_named_as_lost(
    ickpt: Ickpt, place: Path, lost: int, damaged: tuple[int, ...]
) -> None:
    key = f"manifests/0000000{lost}.json"
    (place / key).unlink()
    report = check_repository(Repository(open_store(place)), deep=False)
    assert (report.checkpoints, report.lost, report.damaged) == (3, (lost,), damaged)
    assert {(p.key, p.seq) for p in report.problems} == {(key, seq) for seq in (lost, *damaged)}
    answer = ickpt("check", place)
    assert answer.code == 5
    assert f"  seq {lost}-4  {key}\n    missing, and nothing says that this checkpoint was forgotten" in answer.out
    assert f"  lost:    {lost}\n" in answer.out
    assert f"{len(damaged)} of 3 checkpoints in {place} cannot be restored, and 1 more is lost; " in answer.err
    assert ickpt("check", place, "--json").json["lost"] == [lost]


def test_a_loss_that_nothing_depends_on_is_told_too(ickpt: Ickpt, place: Path) -> None:
    compact(Repository(open_store(place)), 3)
    (place / "manifests/00000002.json").unlink()
    answer = ickpt("check", place)
    assert answer.code == 5
    assert "  whole:   1, 3-4\n  damaged: none\n  lost:    2\n" in answer.out
    assert "2 cannot be gone back to; nothing that is there needs it" in answer.out
    assert f"1 checkpoint of {place} is lost; the first problem: manifests/00000002.json: missing" in answer.err


def trace_of_the_newest(place: Path, trace: str) -> None:
    """What tells that there was a seq 4 beside its manifest."""
    if trace == "a forgotten number above it":
        (place / "manifests/00000005.gone.json").write_bytes(Gone(5, datetime.now(UTC)).to_bytes())
    elif trace == "its equivalent base":
        (place / "manifests/00000004.base.json").write_bytes(b"whatever it says")
    elif trace == "a resume":
        Repository(open_store(place)).write_resume_marker("a" * 16, 1, seq=3, newest=4)
    elif trace == "the word to the other ranks":
        attempt = next(place.glob("data/00000004-*")).name.partition("-")[2]
        (place / f"data/00000004-{attempt}/outcome.json").write_bytes(Outcome(4, attempt, True, "").to_bytes())


TRACES = ["a forgotten number above it", "its equivalent base", "a resume", "the word to the other ranks"]


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("all_are_lost", [False, True])
def test_the_newest_is_missed_by_what_still_speaks_of_it(place: Path, trace: str, all_are_lost: bool) -> None:
    trace_of_the_newest(place, trace)
    for seq in (1, 2, 3, 4) if all_are_lost else (4,):
        (place / f"manifests/0000000{seq}.json").unlink()
    report = check_repository(Repository(open_store(place)), deep=False)
    assert report.lost == ((1, 2, 3, 4) if all_are_lost else (4,))
    assert report.restorable == (() if all_are_lost else (1, 2, 3))


def test_an_attempt_that_was_never_committed_is_no_loss(place: Path) -> None:
    shutil.copytree(next(place.glob("data/00000004-*")), place / f"data/00000005-{'a' * 16}")
    failed = Outcome(6, "b" * 16, False, "no room")
    (place / failed.key).parent.mkdir()
    (place / failed.key).write_bytes(failed.to_bytes())
    assert check_repository(Repository(open_store(place)), deep=False).ok


def test_a_number_that_comes_while_the_listing_is_made_is_no_loss(place: Path) -> None:
    listings = 0

    def hide(op: Op, perform: Perform) -> object:
        nonlocal listings
        found = perform(op)
        if op.kind == "list" and op.key == layout.MANIFESTS:
            listings += 1
            return iter([one for one in found if listings > 1 or one.key != "manifests/00000003.json"])
        return found

    assert check_repository(Repository(FaultStore(open_store(place), hide)), deep=False).lost == ()


def test_a_marker_that_names_an_absurd_number_takes_no_time(place: Path) -> None:
    Repository(open_store(place)).write_resume_marker("a" * 16, 1, seq=3, newest=2**62)
    report = check_repository(Repository(open_store(place)), deep=False)
    assert report.lost == tuple(range(5, 105))
    assert f"{2**62 - 104} more numbers have no manifest either" in [p.what for p in report.problems]


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
