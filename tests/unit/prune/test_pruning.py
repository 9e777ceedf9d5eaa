"""Prune forgets what nobody needs, deletes what belongs to nothing, and nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from chains import Chain, objects, shard, some_rows, values

from incremental_ckpt import Repository
from incremental_ckpt.compaction import compact
from incremental_ckpt.errors import CorruptionError, StorageError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Manifest
from incremental_ckpt.policy import KeepBest, KeepEvery, KeepLast
from incremental_ckpt.pruning import PruneReport, prune
from incremental_ckpt.storage import LocalStore, MemoryStore, Store
from incremental_ckpt.testing import FaultStore, Op, Perform, TracingStore, fail, on

USERS = shard("users", 60, 4)


def chain_of(kinds: str, store: Store | None = None) -> Chain:
    """A checkpoint for each letter: base, consecutive or one-shot delta. Step and metric m are 10 x its number."""
    chain = Chain(store)
    for n, kind in enumerate(kinds, 1):
        rows = range(60) if kind == "b" else some_rows(USERS, 0.3, n)
        chain.save(
            [[(USERS, rows)]],
            kind="base" if kind == "b" else "delta",
            moves_parent=kind != "o",
            metrics={"m": n * 10.0},
        )
    return chain


def seqs(repository: Repository) -> tuple[int, ...]:
    return repository.listing().seqs


def data_of(store: Store) -> set[int]:
    """Numbers that have data."""
    return {parsed.seq for key in objects(store) if key.startswith("data/") and (parsed := layout.parse_key(key))}


def executed(repository: Repository, *keep: KeepLast | KeepBest | KeepEvery) -> PruneReport:
    """Prune, and make sure that all that stays reads as before."""
    before = {seq: values(repository, seq) for seq in seqs(repository)}
    report = prune(repository, keep, dry_run=False)
    assert report.executed
    assert report.failures == ()
    assert set(seqs(repository)) == set(report.plan.kept)
    for seq in seqs(repository):
        assert values(Repository(repository.store), seq) == before[seq]
    assert repository.check(deep=True).problems == ()
    return report


def test_old_checkpoints_go_with_their_data_and_their_numbers_stay() -> None:
    chain = chain_of("bcbcb")
    report = executed(chain.repository, KeepLast(2))
    assert (report.plan.kept, report.plan.wanted, report.forgotten) == ((3, 4, 5), (4, 5), (1, 2))
    assert data_of(chain.repository.store) == {3, 4, 5}
    assert {f"manifests/0000000{n}.json" for n in range(1, 6)} <= objects(chain.repository.store).keys()
    assert chain.repository.listing().gone == {1, 2}
    assert report.bytes_freed == report.plan.bytes > 0


def test_a_chain_is_kept_whole_and_an_equivalent_frees_what_is_before_it() -> None:
    chain = chain_of("bccc")
    assert executed(chain.repository, KeepLast(1)).forgotten == ()
    compact(chain.repository, 3)
    assert executed(chain.repository, KeepLast(1)).forgotten == (1, 2)
    assert data_of(chain.repository.store) == {3, 4}
    assert values(chain.repository, 4)


def test_the_checkpoint_that_the_next_delta_counts_from_is_kept() -> None:
    chain = chain_of("bcboo")
    compact(chain.repository, 5)
    report = executed(chain.repository, KeepLast(1))
    assert report.plan.kept == (3, 5)


def test_several_policies_keep_what_one_of_them_keeps() -> None:
    chain = chain_of("bbbbbbb")
    report = executed(chain.repository, KeepLast(1), KeepEvery(30), KeepBest(1, "m", "min"))
    assert report.plan.kept == (1, 3, 6, 7)


def test_the_newest_is_kept_whatever_the_policies_say() -> None:
    chain = chain_of("bbb")
    assert executed(chain.repository, KeepBest(1, "m", "min")).plan.kept == (1, 3)


def test_what_a_live_job_resumed_from_is_kept_until_a_newer_number_exists() -> None:
    chain = chain_of("bcbb")
    chain.repository.write_resume_marker("00000000000000b7", 1, seq=2, newest=4)
    assert executed(chain.repository, KeepLast(1)).plan.kept == (1, 2, 4)
    chain.save([[(USERS, range(60))]], kind="base")
    assert executed(chain.repository, KeepLast(1)).plan.kept == (5,)


def test_a_dry_run_changes_nothing_and_says_what_would_go() -> None:
    chain = chain_of("bcb")
    store = TracingStore(chain.repository.store)
    report = prune(Repository(store), KeepLast(1))
    assert not report.executed
    assert report.plan.forgotten == (1, 2)
    sizes = objects(chain.repository.store)
    assert report.plan.bytes == sum(size for key, size in sizes.items() if key < "data/00000003")
    assert {t.op.kind for t in store.trace} == {"get", "list"}


def test_pruning_again_does_nothing() -> None:
    chain = chain_of("bcbcb")
    prune(chain.repository, KeepLast(1), dry_run=False)
    store = TracingStore(chain.repository.store)
    report = prune(Repository(store), KeepLast(1), dry_run=False)
    assert (report.forgotten, report.plan.removals, report.plan.equivalents) == ((), (), ())
    assert {t.op.kind for t in store.trace} == {"get", "list"}


def test_gone_is_said_first_of_children_first_then_equivalents_then_data() -> None:
    chain = chain_of("bcccb")
    compact(chain.repository, 3)
    store = TracingStore(chain.repository.store)
    prune(Repository(store), KeepLast(1), dry_run=False)
    written = [t.op for t in store.trace if t.op.kind in ("put_if_absent", "delete")]
    assert [op.key for op in written[:5]] == [*(layout.gone_key(n) for n in (4, 3, 2, 1)), layout.base_key(3)]
    kinds = [layout.parse_key(op.key) for op in written[5:]]
    assert {kind.what for kind in kinds if kind} == {"rank", "pack"}
    for before, after in itertools.pairwise(kinds):
        assert before and after
        assert (before.attempt, before.what) != (after.attempt, "pack") or after.what != "rank"


ORPHAN = "00000000000000d9"
COMPACTION = "c0000000000000d9"


def put_attempt(store: Store, seq: int, attempt: str) -> str:
    key = layout.pack_key(seq, attempt, 0, 0)
    store.put(key, [b"left behind"])
    return key


def test_attempts_that_no_manifest_names_are_deleted_and_later_ones_are_not() -> None:
    chain = chain_of("bcb")
    store = chain.repository.store
    dead, compaction, alive = (
        put_attempt(store, 3, ORPHAN), put_attempt(store, 3, COMPACTION), put_attempt(store, 4, ORPHAN)
    )  # fmt: skip
    report = executed(chain.repository, KeepLast(3))
    assert [r.why for r in report.plan.removals] == ["orphan"]
    assert report.plan.orphan_bytes == len(b"left behind")
    assert dead not in objects(store)
    assert {compaction, alive} <= objects(store).keys()


def test_a_compaction_is_an_orphan_once_an_equivalent_names_another_or_its_checkpoint_is_forgotten() -> None:
    chain = chain_of("bccb")
    store = chain.repository.store
    compact(chain.repository, 3)
    beside, old = put_attempt(store, 3, COMPACTION), put_attempt(store, 2, COMPACTION)
    executed(chain.repository, KeepLast(4))
    assert beside not in objects(store)
    assert old in objects(store)
    assert len(chain.repository.links(3)) == 1
    executed(chain.repository, KeepLast(1))
    assert old not in objects(store)


def test_an_equivalent_that_came_after_its_checkpoint_was_forgotten_is_deleted() -> None:
    chain = chain_of("bcb")
    twin = MemoryStore()
    for key in objects(chain.repository.store):
        twin.put(key, [bytes(chain.repository.store.get(key))])
    compact(Repository(twin), 2)
    prune(chain.repository, KeepLast(1), dry_run=False)
    for key in objects(twin):
        if ".base." in key or "-c" in key:
            chain.repository.store.put(key, [bytes(twin.get(key))])
    report = executed(chain.repository, KeepLast(1))
    assert report.plan.equivalents == ((2, layout.base_key(2)),)
    assert data_of(chain.repository.store) == {3}
    assert layout.base_key(2) not in objects(chain.repository.store)


def test_what_cannot_be_deleted_is_reported_and_tried_again() -> None:
    chain = chain_of("bbb")
    refused = fail(on("delete", "data/00000001-*"), lambda op: StorageError("permission denied"))
    report = prune(Repository(FaultStore(chain.repository.store, refused)), KeepLast(1), dry_run=False)
    assert report.forgotten == (1, 2)
    assert len(report.failures) == 1
    assert "permission denied" in report.failures[0]
    assert data_of(chain.repository.store) == {1, 3}
    again = executed(chain.repository, KeepLast(1))
    assert again.bytes_freed > 0
    assert data_of(chain.repository.store) == {3}


def test_a_store_that_does_not_answer_is_not_asked_again_and_again() -> None:
    chain = chain_of("bbbbb")
    store = TracingStore(chain.repository.store)
    silent = FaultStore(store, fail(on("delete")))
    report = prune(Repository(silent), KeepLast(1), dry_run=False)
    assert len(report.failures) == 1
    assert seqs(chain.repository) == (5,)


@pytest.mark.parametrize("landed", [False, True])
def test_a_checkpoint_that_may_not_be_forgotten_keeps_what_it_needs(landed: bool) -> None:
    chain = chain_of("bcccb")
    store = FaultStore(
        chain.repository.store,
        fail(on("put_if_absent", layout.gone_key(3)), lambda op: StorageError("refused"), landed=landed),
    )
    report = prune(Repository(store), KeepLast(1), dry_run=False)
    assert report.forgotten == (4,)
    assert data_of(chain.repository.store) == {1, 2, 3, 5}
    assert chain.repository.check(deep=True).problems == ()
    executed(chain.repository, KeepLast(1))
    assert data_of(chain.repository.store) == {5}


def damage_manifest(store: Store, key: str) -> None:
    raw = bytearray(store.get(key))
    raw[100] ^= 1
    store.delete([key])
    store.put(key, [raw])


def test_a_damaged_newest_manifest_stops_it_before_anything_is_touched() -> None:
    chain = chain_of("bcb")
    damage_manifest(chain.repository.store, layout.manifest_key(3))
    before = objects(chain.repository.store)
    with pytest.raises(CorruptionError, match="newest checkpoint, seq 3"):
        prune(Repository(chain.repository.store), KeepLast(1), dry_run=False)
    assert objects(chain.repository.store) == before


def test_a_damaged_manifest_that_something_kept_needs_stops_it() -> None:
    chain = chain_of("bbcc")
    damage_manifest(chain.repository.store, layout.manifest_key(3))
    with pytest.raises(CorruptionError, match=r"seq 3 .*needs it"):
        prune(Repository(chain.repository.store), KeepLast(1), dry_run=False)


@pytest.mark.parametrize("lost", [".json", ".safetensors", "the end of a pack"])
def test_damaged_checkpoints_are_not_counted_and_stay_unless_they_are_old(lost: str) -> None:
    chain = chain_of("bbbbb")
    store = chain.repository.store
    damage_manifest(store, layout.manifest_key(1))
    of_4 = [key for key in objects(store) if key.startswith("data/00000004-")]
    if lost.startswith("."):
        store.delete([key for key in of_4 if key.endswith(lost)])
    else:
        pack = next(key for key in of_4 if key.endswith(".safetensors"))
        raw = bytes(store.get(pack))
        store.delete([pack])
        store.put(pack, [raw[:-1]])
    report = prune(Repository(store), KeepLast(2), dry_run=False)
    assert (report.plan.wanted, report.plan.damaged) == ((3, 5), (1, 4))
    assert seqs(chain.repository) == (3, 4, 5)


def test_the_only_checkpoint_that_can_be_resumed_is_not_pruned_for_a_newer_one_whose_pack_is_lost() -> None:
    chain = chain_of("bb")
    store = chain.repository.store
    store.delete([key for key in objects(store) if key.startswith("data/00000002-") and key.endswith(".safetensors")])
    report = prune(Repository(store), KeepLast(1), dry_run=False)
    assert (report.plan.kept, report.plan.wanted, report.plan.damaged) == ((1, 2), (1,), (2,))


@pytest.mark.parametrize("what", ["rank manifests", "packs"])
def test_an_equivalent_that_is_not_whole_frees_nothing(what: str) -> None:
    chain = chain_of("bcc")
    compact(chain.repository)
    store = chain.repository.store
    ranks = chain.repository.rank_manifests(chain.repository.links(3)[0].tables)
    lost = [rank.key for rank in ranks] if what == "rank manifests" else [ranks[0].packs[0].key]
    store.delete(lost)
    report = prune(Repository(store), KeepLast(1), dry_run=False)
    assert report.plan.kept == (1, 2, 3)
    store.delete([layout.base_key(3)])
    assert Repository(store).check(deep=True).problems == ()


def test_a_resume_marker_that_cannot_be_read_stops_it() -> None:
    chain = chain_of("bb")
    chain.repository.write_resume_marker("00000000000000b7", 1, seq=1, newest=2)
    damage_manifest(chain.repository.store, layout.resume_key("00000000000000b7", 1))
    with pytest.raises(CorruptionError, match="resumes/"):
        prune(chain.repository, KeepLast(1), dry_run=False)
    assert seqs(chain.repository) == (1, 2)


def test_what_a_prune_or_compaction_took_meanwhile_is_not_taken_for_damage() -> None:
    chain = chain_of("bccb")
    store = chain.repository.store
    compact(chain.repository, 3)
    equivalent = {layout.base_key(3): bytes(store.get(layout.base_key(3)))}
    store.delete(equivalent)

    def pass_by(op: Op, perform: Perform) -> object:
        if op.kind == "list" and op.key == layout.DATA and equivalent:
            key, raw = equivalent.popitem()
            store.put(key, [raw])
            prune(Repository(store), KeepLast(2), dry_run=False)
        return perform(op)

    report = prune(Repository(FaultStore(store, pass_by)), KeepLast(2), dry_run=False)
    assert (report.plan.wanted, report.plan.damaged) == ((3, 4), ())
    assert seqs(chain.repository) == (3, 4)


def test_temporary_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    chain = chain_of("b", LocalStore(tmp_path / "run"))
    (tmp_path / "run" / "manifests" / ".tmp-0123456789abcdef").write_bytes(b"half a manifest")
    report = prune(chain.repository, KeepLast(1), dry_run=False)
    assert report.bytes_freed == len(b"half a manifest")
    assert not list((tmp_path / "run" / "manifests").glob(".tmp-*"))


def test_an_empty_repository_has_nothing_to_prune() -> None:
    report = prune(Repository(MemoryStore()), KeepLast(1), dry_run=False)
    assert report.plan.kept == ()


def test_nothing_to_keep_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one policy"):
        prune(chain_of("b").repository, [])


def test_the_manifest_of_a_forgotten_number_still_reads(tmp_path: Path) -> None:
    chain = chain_of("bb")
    prune(chain.repository, KeepLast(1), dry_run=False)
    assert isinstance(chain.repository.manifest(1), Manifest)
