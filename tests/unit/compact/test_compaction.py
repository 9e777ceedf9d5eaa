"""An equivalent base reads as its chain does, bit for bit, and is written once, whoever and however many write it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from chains import Chain, column_parts, copy_of, equivalent_entries, objects, shard, some_rows, values
from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, Repository, Settings
from incremental_ckpt.compaction import compact, cut, part
from incremental_ckpt.errors import CorruptionError, MismatchError, NotFoundError, StorageError
from incremental_ckpt.format.manifest import Gone, RankManifest
from incremental_ckpt.model import Shard
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore, Op, Perform, TracingStore, damage, fail, on

MIB = 1 << 20
TINY = Settings(pack_bytes=2500, entry_bytes=1024, low_priority=False)


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a few rows and packs of a few windows, so that small tables have many."""
    monkeypatch.setattr(cut, "ENTRY_BYTES", 256)
    monkeypatch.setattr(part, "PACK_BYTES", 2048)


def two_tables(codec: str = "raw", *, deltas: int = 4, unheld: bool = False) -> Chain:
    users, items = shard("users", 200, 8), shard("items", 37, 4, momentum=False)
    chain = Chain()
    chain.save([[(users, range(200)), (items, range(37))]], codec=codec, unheld=unheld)
    for n in range(deltas):
        rows = [(users, some_rows(users, 0.2, n)), (items, some_rows(items, 0.3, n))]
        chain.save([rows], codec=codec, unheld=unheld)
    return chain


def compacts_to_the_same(chain: Chain) -> None:
    repository, seq = chain.repository, chain.seq
    before = values(repository, seq)
    report = compact(repository)
    assert report.complete
    assert len(repository.links(seq)) == 1
    assert values(repository, seq) == before
    assert repository.check(deep=True).problems == ()


@pytest.mark.parametrize("codec", ["raw", "fp16", "int8", "int4", "int2"])
@pytest.mark.parametrize("unheld", [False, True])
def test_an_equivalent_reads_as_its_chain(codec: str, unheld: bool) -> None:
    compacts_to_the_same(two_tables(codec, unheld=unheld))


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_an_equivalent_of_many_windows_and_packs_reads_as_its_chain(codec: str) -> None:
    chain = two_tables(codec, unheld=True)
    compacts_to_the_same(chain)
    equivalent = chain.repository.equivalent(chain.repository.manifest(chain.seq))
    assert equivalent is not None
    packs = [p for rank in chain.repository.rank_manifests(equivalent) for p in rank.packs]
    assert len(packs) > 3
    assert max(p.size - p.header_size for p in packs) <= 2048


def test_records_are_moved_and_not_encoded_again() -> None:
    chain = two_tables("int4", unheld=True)
    compact(chain.repository)
    found = equivalent_entries(chain.repository, chain.seq)
    assert {(e.field, e.codec) for e in found} == {("weight", "int4"), ("weight", "raw"), ("momentum1", "raw")}


def test_a_chain_of_mixed_codecs_keeps_each_row_in_its_own() -> None:
    chain = Chain()
    users = shard("users", 300, 16)
    for n, codec in enumerate(["int8", "raw", "int4", "fp16"]):
        chain.save([[(users, range(300) if n == 0 else some_rows(users, 0.25, n))]], codec=codec)
    compacts_to_the_same(chain)
    found = equivalent_entries(chain.repository, chain.seq)
    assert {e.codec for e in found if e.field == "weight"} == {"int8", "raw", "int4", "fp16"}


def row_shards(cuts: Sequence[int], cols: int = 8) -> list[Shard]:
    edges = [0, *cuts, 200]
    return [
        shard("users", 200, cols, at=(a, 0), part=(b - a, cols)) for a, b in itertools.pairwise(edges)
    ]  # fmt: skip


@pytest.mark.usefixtures("small_cuts")
def test_rows_that_moved_between_ranks_are_found() -> None:
    chain = Chain()
    chain.save([[(s, range(s.rows))] for s in row_shards([70])])
    chain.save([[(s, some_rows(s, 0.3, 1))] for s in row_shards([30, 31, 150])])
    chain.save([[(s, some_rows(s, 0.3, 2))] for s in row_shards([])])
    compacts_to_the_same(chain)


def test_a_table_that_ranks_hold_alike_is_written_once() -> None:
    chain, users = Chain(), shard("users", 200, 8)
    chain.save([[(users, range(90))], [(users, range(90, 200))]], replicated=True)
    chain.save([[(users, np.arange(10, 60))], [(users, np.arange(60, 100))]], replicated=True)
    compacts_to_the_same(chain)
    found = equivalent_entries(chain.repository, chain.seq)
    assert sum(len(e.rows) for e in found if e.field == "weight") == 200


def test_column_shards_keep_a_state_of_their_own() -> None:
    chain = Chain()
    for n in range(3):
        parts = column_parts("users", 100, [0, 4, 12], momentum=True)
        chain.save([[(s, range(100) if n == 0 else some_rows(s, 0.3, n)) for s in parts]], codec="int8")
    before = values(chain.repository, 3)
    compact(chain.repository)
    assert values(chain.repository, 3) == before
    found = chain.repository.rank_manifests(chain.repository.links(3)[0].tables)[0].shards
    assert [s.shard.col_start for s in found] == [0, 4]


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.usefixtures("small_cuts")
def test_columns_that_were_cut_otherwise_lose_nothing(codec: str) -> None:
    chain = Chain()
    for n, edges in enumerate([[0, 12], [0, 4, 12], [0, 6, 12], [0, 4, 12]]):
        parts = column_parts("users", 100, edges, momentum=False)
        chain.save([[(s, range(100) if n == 0 else some_rows(s, 0.3, n)) for s in parts]], codec=codec)
    compacts_to_the_same(chain)


def test_row_wise_state_that_would_have_to_be_averaged_is_refused() -> None:
    chain = Chain()
    chain.save([[(s, range(100)) for s in column_parts("users", 100, [0, 4, 12], momentum=True)]])
    chain.save([[(s, np.arange(5)) for s in column_parts("users", 100, [0, 12], momentum=True)]])
    with pytest.raises(MismatchError, match=r"users.*momentum1"):
        compact(chain.repository)


def test_compacting_again_does_nothing() -> None:
    chain = two_tables()
    compact(chain.repository)
    store = TracingStore(chain.repository.store)
    report = compact(Repository(store))
    assert (report.complete, report.bytes_written, report.chain) == (True, 0, 1)
    assert [t.op for t in store.trace if t.op.kind not in ("get", "list")] == []


def test_a_base_is_left_alone() -> None:
    chain = two_tables(deltas=0)
    assert compact(chain.repository).complete
    assert not [key for key in objects(chain.repository.store) if ".base." in key]


def test_an_older_checkpoint_can_be_compacted_and_its_children_read_from_it() -> None:
    chain = two_tables()
    before = values(chain.repository, 5)
    assert compact(chain.repository, 3).chain == 3
    assert [link.manifest.seq for link in chain.repository.links(5)] == [3, 4, 5]
    assert values(chain.repository, 5) == before
    assert compact(chain.repository).chain == 3
    assert values(chain.repository, 5) == before


@pytest.mark.usefixtures("small_cuts")
def test_the_same_bytes_are_written_from_a_chain_and_from_an_equivalent_of_its_middle() -> None:
    chain = two_tables("int8", unheld=True)
    other = copy_of(chain.repository.store)
    compact(Repository(other), 3)
    compact(Repository(other), 5)
    compact(chain.repository, 5)
    equivalent = chain.repository.equivalent(chain.repository.manifest(5))
    assert equivalent is not None
    folder = f"data/00000005-{equivalent.attempt}/"
    written = {o.key: bytes(chain.repository.store.get(o.key)) for o in chain.repository.store.list(folder)}
    assert written == {o.key: bytes(other.get(o.key)) for o in other.list(folder)}


@pytest.mark.usefixtures("small_cuts")
def test_processes_share_the_work_and_the_last_one_commits() -> None:
    chain = two_tables("int8", unheld=True)
    before = values(chain.repository, 5)
    reports = [compact(chain.repository, shard=(i, 3)) for i in (2, 0)]
    assert [r.missing for r in reports] == [(0, 1), (1,)]
    assert not any(r.complete for r in reports)
    assert not chain.repository.listing().bases
    last = compact(chain.repository, shard=(1, 3))
    assert last.complete
    assert last.rows + sum(r.rows for r in reports) == 237
    assert values(chain.repository, 5) == before
    assert chain.repository.check(deep=True).problems == ()


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize("what", ["pack", "rows"])
def test_a_part_that_is_not_whole_is_not_committed(what: str) -> None:
    chain = two_tables()
    compact(chain.repository, shard=(0, 2))
    store = chain.repository.store
    (key,) = (key for key in objects(store) if "-c" in key and key.endswith("rank-00000.json"))
    found = RankManifest.from_bytes(bytes(store.get(key)), key)
    if what == "pack":
        store.delete([found.packs[-1].key])
    else:
        store.delete([key])
        store.put(key, [replace(found, shards=found.shards[:-1]).to_bytes()])
    with pytest.raises(CorruptionError, match=r"of no use.*Delete data/00000005-c"):
        compact(chain.repository, shard=(1, 2))
    assert not chain.repository.listing().bases


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_every_row_is_in_one_part(parts: int) -> None:
    shards = [shard("a", 1000, 64), shard("b", 0, 4), shard("c", 3, 4), shard("d", 10**6, 16)]
    found = [s for k in range(parts) for s in cut.shards_of_part(shards, k, parts)]
    for whole in shards:
        edges = [(s.row_start, s.row_start + s.rows) for s in found if s.table == whole.table]
        assert [a for a, _ in edges] == [0, *(b for _, b in edges[:-1])]
        assert edges[-1][1] == whole.rows


@pytest.mark.usefixtures("small_cuts")
def test_what_an_earlier_try_wrote_is_verified_and_kept() -> None:
    chain = two_tables()
    compact(chain.repository)
    repository = chain.repository
    equivalent = repository.equivalent(repository.manifest(5))
    assert equivalent is not None
    (rank,) = repository.rank_manifests(equivalent)
    lost = rank.packs[1].key
    repository.store.delete([equivalent.key, rank.key, lost])
    store = TracingStore(repository.store)
    assert compact(Repository(store)).complete
    assert [t.op.key for t in store.find("put")] == [lost, rank.key]
    read = {t.op.key for t in store.find("get", f"data/00000005-{rank.attempt}/*.safetensors")}
    assert read == {p.key for p in rank.packs}


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize("size", ["same", "shorter"])
def test_what_an_earlier_try_left_damaged_is_named(size: str) -> None:
    chain = two_tables()
    compact(chain.repository)
    store = chain.repository.store
    equivalent = chain.repository.equivalent(chain.repository.manifest(5))
    assert equivalent is not None
    (rank,) = chain.repository.rank_manifests(equivalent)
    key = rank.packs[1].key
    raw = bytearray(store.get(key))
    raw[-3] ^= 1
    store.delete([equivalent.key, rank.key, key])
    store.put(key, [raw if size == "same" else raw[:-8]])
    with pytest.raises(CorruptionError, match="delete it and compact again") as caught:
        compact(Repository(store))
    assert caught.value.key == key
    assert not Repository(store).listing().bases


def test_nothing_is_committed_that_the_store_does_not_give_back() -> None:
    chain = two_tables()
    store = FaultStore(chain.repository.store, damage(on("get", "data/00000005-c*.safetensors"), at=-3))
    with pytest.raises(CorruptionError, match="does not hold what the compaction writes"):
        compact(Repository(store))
    assert not chain.repository.listing().bases


def test_a_damaged_input_is_named_and_nothing_is_committed() -> None:
    chain = two_tables()
    store = FaultStore(chain.repository.store, damage(on("get", "data/00000002-*.safetensors"), at=-1))
    with pytest.raises(CorruptionError, match="data/00000002-"):
        compact(Repository(store))
    assert not chain.repository.listing().bases


def test_a_commit_whose_answer_is_lost_counts() -> None:
    chain = two_tables()
    store = FaultStore(chain.repository.store, fail(on("put_if_absent", "*.base.json"), landed=True))
    assert compact(Repository(store)).complete
    assert chain.repository.listing().bases == {5}


def test_a_commit_that_fails_is_an_error() -> None:
    chain = two_tables()
    store = FaultStore(chain.repository.store, fail(on("put_if_absent", "*.base.json")))
    with pytest.raises(StorageError, match="no answer"):
        compact(Repository(store))
    assert compact(chain.repository).complete


def test_a_checkpoint_that_a_prune_takes_meanwhile_is_gone_and_not_damaged() -> None:
    chain = two_tables()

    def prune(op: Op, perform: Perform) -> object:
        if op.kind == "get" and op.key.startswith("data/00000003-") and op.key.endswith(".safetensors"):
            store = chain.repository.store
            gone = Gone(4, chain.repository.manifest(4).created)
            store.put_if_absent(gone.key, [gone.to_bytes()])
            store.delete([o.key for s in (3, 4) for o in store.list(f"data/0000000{s}-")])
        return perform(op)

    with pytest.raises(NotFoundError, match="no checkpoint 4"):
        compact(Repository(FaultStore(chain.repository.store, prune)), 4)


@pytest.mark.parametrize(("memory", "shard_of"), [(MIB, (0, 1)), (512 * MIB, (2, 2)), (512 * MIB, (-1, 2))])
def test_arguments_out_of_range_are_refused(memory: int, shard_of: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"compaction needs|shard must be"):
        compact(two_tables().repository, memory=memory, shard=shard_of)


@pytest.mark.parametrize("layout", ["adagrad", "fused", "sparse_adam"])
def test_a_run_resumes_from_an_equivalent_bit_for_bit_and_goes_on_with_deltas(layout: str) -> None:
    store, run = MemoryStore(), Run(layout)
    with Checkpointer(run.model, store, **run.arguments, settings=TINY, kind="consecutive") as ckpt:
        for step in range(1, 5):
            run.train()
            ckpt.save_checkpoint(step).wait()
            if step == 3:
                compact(Repository(store))
        saved = run.copy()
        compact(Repository(store))
        for without in (False, True):
            if without:
                store.delete(["manifests/00000004.base.json", "manifests/00000003.base.json"])
            heir = Run(layout, seed=7)
            twin = copy_of(store)
            with Checkpointer(heir.model, twin, **heir.arguments, settings=TINY, kind="consecutive") as resumed:
                assert resumed.resume_from_checkpoint() is not None
                assert_same(heir.copy(), saved)
                heir.train()
                assert resumed.save_checkpoint(5).wait().parent == 4
            assert Repository(twin).check(deep=True).problems == ()
            assert len(Repository(twin).links(5)) == (5 if without else 2)


def test_compaction_pruning_and_comparison_load_no_torch() -> None:
    code = (
        "import sys; import incremental_ckpt.compaction, incremental_ckpt.pruning, incremental_ckpt.comparison; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
