"""Compactions and prunes that pass while a resume or a check reads: it goes on with what there is now, and takes
nothing that they took for damage."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, CorruptionError, KeepLast, Repository, Settings, StorageError
from incremental_ckpt.adapters.composite import CompositeAdapter
from incremental_ckpt.compaction import compact
from incremental_ckpt.format.sealed import FORMAT, seal, unseal
from incremental_ckpt.pruning import prune
from incremental_ckpt.resuming import Resume, Resumed
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore, Op, Perform, damage, on
from incremental_ckpt.testing.faults import When

SAVES, COMPACTED = 9, 5


def checkpointer(run: Run, store: Any, **arguments: Any) -> Checkpointer:
    return Checkpointer(run.model, store, **run.arguments, kind="consecutive", **arguments)


def saved(store_name: str, *, compacted: bool, pruned: bool = True) -> dict[str, Any]:
    """Nine checkpoints, if so with an equivalent base of the fifth and nothing below it; the newest state."""
    run, repository = Run(), Repository(MemoryStore(store_name))
    with checkpointer(run, MemoryStore(store_name)) as c:
        for step in range(1, SAVES + 1):
            run.train()
            c.save_checkpoint(step).wait()
            if step == COMPACTED and compacted:
                compact(repository)
                if pruned:
                    prune(repository, KeepLast(1), dry_run=False)
    return run.copy()


def compact_and_prune(store_name: str, seq: int) -> None:
    repository = Repository(MemoryStore(store_name))
    compact(repository, seq)
    prune(repository, KeepLast(1), dry_run=False)


class Before:
    """Does something once, before the first operation of a kind."""

    def __init__(self, when: When, then: Callable[[], None]) -> None:
        self._when = when
        self._then: Callable[[], None] | None = then

    def __call__(self, op: Op, perform: Perform) -> Any:
        if self._then is not None and self._when(op):
            then, self._then = self._then, None
            then()
        return perform(op)

    @property
    def done(self) -> bool:
        return self._then is None


def assert_resumes_the_newest(store: FaultStore, state: dict[str, Any], step: int | None) -> None:
    again = Run(seed=8)
    events: list[Any] = []
    with checkpointer(again, store, on_event=events.append) as c:
        progress = c.resume_from_checkpoint(step)
    assert progress is not None
    assert progress.step == SAVES
    assert events[0].passed_over == ()
    assert_same(again.copy(), state)


@pytest.mark.parametrize("step", [None, SAVES])
@pytest.mark.parametrize("overtaking", [8, 9])
@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("before", [("list", "data/*"), ("get", "data/*.safetensors")], ids=str)
def test_a_compaction_and_a_prune_that_pass_at_any_point_of_a_resume_cost_it_no_checkpoint(
    before: tuple[Any, str], compacted: bool, overtaking: int, step: int | None, store_name: str
) -> None:
    state = saved(store_name, compacted=compacted)
    passing = Before(on(*before), lambda: compact_and_prune(store_name, overtaking))
    assert_resumes_the_newest(FaultStore(MemoryStore(store_name), passing), state, step)
    assert passing.done


def break_base(store_name: str, break_document: Callable[[bytes, str], bytes]) -> None:
    store, key = MemoryStore(store_name), f"manifests/{COMPACTED:08}.base.json"
    broken = break_document(bytes(store.get(key)), key)
    store.delete([key])
    store.put(key, [broken])


def flipped(document: bytes, key: str) -> bytes:
    return document[:-1] + bytes([document[-1] ^ 1])


def of_a_newer_version(document: bytes, key: str) -> bytes:
    members = unseal(document, key)
    del members["digest"]
    return bytes(seal({**members, "format": FORMAT + 1}))


@pytest.mark.parametrize("step", [None, SAVES])
@pytest.mark.parametrize("broken", [flipped, of_a_newer_version])
def test_what_was_compacted_while_a_broken_equivalent_base_was_tried_is_what_is_resumed_then(
    broken: Callable[[bytes, str], bytes], step: int | None, store_name: str
) -> None:
    state = saved(store_name, compacted=True, pruned=False)
    break_base(store_name, broken)
    lost = [one.key for one in MemoryStore(store_name).list("data/00000001-")]

    def passes() -> None:
        compact(Repository(MemoryStore(store_name)), SAVES)
        MemoryStore(store_name).delete(lost)

    passing = Before(on("get", f"manifests/{COMPACTED:08}.base.json"), passes)
    assert_resumes_the_newest(FaultStore(MemoryStore(store_name), passing), state, step)


class OfTwo:
    """Two ranks in threads that meet at a barrier."""

    world_size = 2
    barrier = threading.Barrier(2, timeout=60)

    def __init__(self, rank: int, reports: dict[int, Any]) -> None:
        self.rank = rank
        self._reports = reports

    def meet(self, report: Any) -> list[Any]:
        self._reports[self.rank] = json.loads(json.dumps(report))
        self.barrier.wait()
        told = [self._reports[rank] for rank in range(2)]
        self.barrier.wait()
        return told


@pytest.mark.parametrize("broken", [flipped, of_a_newer_version])
def test_where_only_another_rank_than_rank_0_was_overtaken_both_begin_anew(
    broken: Callable[[bytes, str], bytes], store_name: str
) -> None:
    saved(store_name, compacted=True, pruned=False)
    rank_1 = MemoryStore(store_name)
    key = f"manifests/{COMPACTED:08}.base.json"
    raw = broken(bytes(rank_1.get(key)), key)

    def breaks(op: Op, perform: Perform) -> Any:
        if op.kind != "get" or op.key != key:
            return perform(op)
        if SAVES not in Repository(rank_1).listing().bases:
            compact(Repository(MemoryStore(store_name)), SAVES)
        return memoryview(raw)

    reports: dict[int, Any] = {}

    def resumed(rank: int, *injectors: Any) -> Resumed | None:
        again = Run(seed=8)
        adapter = CompositeAdapter(again.model, again.arguments["optimizer"], strict=True)
        state = {**again.arguments["state"]}
        repository = Repository(FaultStore(MemoryStore(store_name), *injectors))
        coordinator: Any = OfTwo(rank, reports)
        return Resume(repository, adapter, state, Settings(), coordinator, job="a" * 16, strict=True).run(None)

    with ThreadPoolExecutor(2) as ranks:
        found = [each.result() for each in [ranks.submit(resumed, 0), ranks.submit(resumed, 1, breaks)]]
    for each in found:
        assert each is not None
        assert [manifest.seq for manifest in each.chain] == [SAVES]
        assert each.passed_over == ()


def test_a_resume_that_is_overtaken_in_every_pass_says_so_and_takes_no_older_checkpoint(
    store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("incremental_ckpt.resuming._PASSES", 3)
    saved(store_name, compacted=False)
    others = iter(range(2, SAVES))

    def compacts(op: Op, perform: Perform) -> Any:
        if op.kind == "get" and op.key.startswith(f"data/{SAVES:08}-") and op.key.endswith(".safetensors"):
            compact(Repository(MemoryStore(store_name)), next(others))
        return perform(op)

    store = FaultStore(MemoryStore(store_name), compacts, damage(on("get", f"data/{SAVES:08}-*.safetensors"), at=-1))
    again = Run(seed=8)
    with checkpointer(again, store) as c, pytest.raises(StorageError, match=r"3 times a compaction or a prune") as told:
        c.resume_from_checkpoint()
    assert told.value.retryable


def test_what_is_damaged_though_nobody_passes_is_still_damaged(store_name: str) -> None:
    saved(store_name, compacted=True)
    store = FaultStore(MemoryStore(store_name), damage(on("get", f"data/{SAVES:08}-*.safetensors"), at=-1))
    again = Run(seed=8)
    with checkpointer(again, store) as c:
        with pytest.raises(CorruptionError):
            c.resume_from_checkpoint(SAVES)
        progress = c.resume_from_checkpoint()
    assert progress is not None
    assert progress.step == SAVES - 1


class InEachPass:
    """Does the next of some things in each pass of a check, before anything but manifests is read."""

    def __init__(self, *each: Callable[[], None]) -> None:
        self.left = list(each)
        self._begins = False

    def __call__(self, op: Op, perform: Perform) -> Any:
        if op.kind == "list" and op.key.startswith("manifests/"):
            self._begins = True
        elif op.key.startswith("data/0") and op.kind == "get" and self._begins and self.left:
            self._begins = False
            self.left.pop(0)()
        return perform(op)


@pytest.mark.parametrize("deep", [False, True])
def test_a_check_of_a_whole_store_that_is_overtaken_again_and_again_reads_on_until_it_knows(
    deep: bool, store_name: str
) -> None:
    saved(store_name, compacted=True)
    passing = InEachPass(*(partial(compact_and_prune, store_name, seq) for seq in (6, 7, 8, 9)))
    report = Repository(FaultStore(MemoryStore(store_name), passing)).check(deep=deep)
    assert not passing.left
    assert report.ok, report.problems
    assert report.restorable == (9,)


def test_a_check_that_is_overtaken_in_every_pass_says_so_and_finds_no_damage(
    store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("incremental_ckpt.repository.check._PASSES", 3)
    saved(store_name, compacted=True)
    passing = InEachPass(*(partial(compact_and_prune, store_name, seq) for seq in (6, 7, 8, 9)))
    with pytest.raises(StorageError, match="3 times a compaction or a prune") as told:
        Repository(FaultStore(MemoryStore(store_name), passing)).check()
    assert told.value.retryable


def test_damage_that_a_second_pass_meets_again_is_damage_whoever_passes(store_name: str) -> None:
    saved(store_name, compacted=True)
    other = Repository(MemoryStore(store_name))
    passing = InEachPass(*(partial(compact, other, seq) for seq in (6, 7, 8)))
    damaged = damage(on("get", f"data/{SAVES:08}-*.safetensors"), at=-1)
    report = Repository(FaultStore(MemoryStore(store_name), passing, damaged)).check(deep=True)
    assert len(passing.left) == 1
    assert report.damaged == (SAVES,)
    assert {problem.seq for problem in report.problems} == {SAVES}
