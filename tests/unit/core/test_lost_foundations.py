"""A store that loses, under a run, what deltas count from: the next save says so, and the one after it stands alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest
from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, ConflictError, KeepLast, Repository, SaveError, Settings, StorageError
from incremental_ckpt.compaction import compact
from incremental_ckpt.format import layout
from incremental_ckpt.pruning import prune
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore, Injector, Op, Perform, fail, on

TINY = Settings(pack_bytes=900, entry_bytes=256, low_priority=False)
KINDS = ("consecutive", "one-shot", "intermittent")


@pytest.fixture
def run() -> Run:
    return Run()


def checkpointer(run: Run, store: Any, kind: str = "consecutive", **arguments: Any) -> Checkpointer:
    store = MemoryStore(store) if isinstance(store, str) else store
    return Checkpointer(run.model, store, **run.arguments, kind=kind, **{"settings": TINY, **arguments})


def save(run: Run, c: Checkpointer, step: int) -> str:
    run.train()
    return c.save_checkpoint(step).wait().kind


def lose(store_name: str, *patterns: str, but: Sequence[str] = ()) -> None:
    """Somebody deletes objects by hand."""
    store = MemoryStore(store_name)
    keys = [one.key for one in store.list() if any(fnmatchcase(one.key, pattern) for pattern in patterns)]
    assert keys, patterns
    store.delete([key for key in keys if key not in but])


def assert_resumes(store_name: str, state: dict[str, Any], seq: int) -> None:
    again = Run(seed=8)
    with checkpointer(again, store_name) as c:
        progress = c.resume_from_checkpoint()
    assert progress is not None
    assert progress.seq == seq
    assert_same(again.copy(), state)


BASE_LOST = {
    "everything": ("*",),
    "all but the newest": ("repo.json", "manifests/00000001.json", "data/00000001-*"),
    "the base": ("data/00000001-*",),
    "a pack of the base": ("data/00000001-*/rank-00000-0001.safetensors",),
    "a vote of the base": ("data/00000001-*/rank-00000.json",),
    "the parent and the base": ("manifests/*", "data/*"),
}


@pytest.mark.parametrize("lost", BASE_LOST.values(), ids=BASE_LOST.keys())
@pytest.mark.parametrize(("kind", "resumed_before"), [("consecutive", True), ("one-shot", False)])
def test_a_delta_without_its_base_is_refused_and_the_save_after_it_is_a_base_that_comes_back(
    lost: Sequence[str], kind: str, resumed_before: bool, run: Run, store_name: str
) -> None:
    with checkpointer(run, store_name, kind) as c:
        assert save(run, c, 1) == "base"
        assert save(run, c, 2) == "delta"
        if resumed_before:
            c.resume_from_checkpoint()
        lose(store_name, *lost)
        words = (
            r"step 3 \(seq 3\) committed nothing: .* gone from memory://.*(missing|no object|instead of).* is a base"
        )
        with pytest.raises(SaveError, match=words) as caught:
            save(run, c, 3)
        assert type(caught.value) is SaveError
        assert Repository(MemoryStore(store_name)).exists
        assert 3 not in Repository(MemoryStore(store_name)).listing().seqs
        assert save(run, c, 4) == "base"
        assert save(run, c, 5) == "delta"
        assert_resumes(store_name, run.copy(), 4)


def test_a_lost_manifest_between_base_and_parent_is_noticed_by_the_next_save(run: Run, store_name: str) -> None:
    with checkpointer(run, store_name) as c:
        for step in (1, 2, 3, 4):
            save(run, c, step)
        lose(store_name, "manifests/0000000[23].json")
        words = r"is written and cannot be resumed: .*manifests/00000002.json is missing, and 1 more.* is a base"
        with pytest.raises(SaveError, match=words):
            save(run, c, 5)
        assert save(run, c, 6) == "base"
    assert_resumes(store_name, run.copy(), 6)


@pytest.mark.parametrize("kind", [*KINDS, "full"])
@pytest.mark.parametrize("lost", [("repo.json",), ("repo.json", "resumes/*")])
def test_a_lost_repo_json_alone_is_made_again_by_the_next_save_with_a_warning(
    kind: str, lost: Sequence[str], run: Run, store_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with checkpointer(run, store_name, kind) as c:
        save(run, c, 1)
        c.resume_from_checkpoint()
        lose(store_name, *lost)
        save(run, c, 2)
    assert "has lost its repo.json under the run" in caplog.text
    assert_resumes(store_name, run.copy(), 2)


def test_a_base_needs_nothing_and_makes_a_deleted_store_whole_at_once(
    run: Run, store_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with checkpointer(run, store_name, "full") as c:
        save(run, c, 1)
        lose(store_name, "*")
        with caplog.at_level(logging.WARNING):
            save(run, c, 2)
    assert "does somebody delete what lies there?" in caplog.text
    assert_resumes(store_name, run.copy(), 2)


def exchanged(store_name: str, saves: int) -> Callable[[], None]:
    """The store now holds another run's checkpoints."""

    def exchange() -> None:
        lose(store_name, "*")
        other = Run(seed=5)
        with checkpointer(other, store_name) as c:
            for step in range(1, saves + 1):
                save(other, c, step)

    return exchange


@pytest.mark.parametrize("saves", [1, 2, 3])
@pytest.mark.parametrize("resumed_before", [False, True])
def test_a_job_whose_store_holds_another_run_now_is_told_of_the_conflict_and_writes_nothing_into_it(
    saves: int, resumed_before: bool, run: Run, store_name: str
) -> None:
    c = checkpointer(run, store_name)
    save(run, c, 1)
    save(run, c, 2)
    if resumed_before:
        c.resume_from_checkpoint()
    exchanged(store_name, saves)()
    for step in (3, 4):
        with pytest.raises(ConflictError, match=r"another job .* has committed seq"):
            save(run, c, step)
    c.close()
    assert Repository(MemoryStore(store_name)).listing().seqs == tuple(range(1, saves + 1))
    assert Repository(MemoryStore(store_name)).check(deep=True).ok


def test_a_fallback_never_takes_a_checkpoint_that_another_run_has_left_under_the_number_of_an_ancestor(
    run: Run, store_name: str
) -> None:
    with checkpointer(run, store_name, "full") as c:
        save(run, c, 1)
        save(run, c, 2)
        exchanged(store_name, 1)()
        save(run, c, 3)
    lose(store_name, "data/00000003-*.safetensors")
    again = Run(seed=8)
    with checkpointer(again, store_name) as c, pytest.raises(Exception, match="none of its ancestors is whole"):
        c.resume_from_checkpoint()


def test_a_compaction_and_a_prune_that_pass_under_a_run_take_nothing_that_its_deltas_count_from(
    run: Run, store_name: str
) -> None:
    repository = Repository(MemoryStore(store_name))
    with checkpointer(run, store_name) as c:
        for step in range(1, 9):
            kind = save(run, c, step)
            assert kind == ("delta" if step > 1 else "base")
            if step in (2, 3, 6):
                compact(repository)
                prune(repository, KeepLast(1), dry_run=False)
            if step == 4:
                c.resume_from_checkpoint()
        assert not [*MemoryStore(store_name).list("data/00000001-")], "the first base is still there"
        lose(store_name, "data/00000006-c*")
        with pytest.raises(SaveError, match="data/00000006-c"):
            save(run, c, 9)
        assert save(run, c, 10) == "base"
    assert_resumes(store_name, run.copy(), 9)


def test_a_store_that_is_emptied_while_a_delta_is_written_fails_that_delta(run: Run, store_name: str) -> None:
    def emptied(op: Op, perform: Perform) -> Any:
        if op.kind == "put_if_absent" and op.key == layout.manifest_key(3):
            lose(store_name, "*")
        return perform(op)

    with checkpointer(run, FaultStore(MemoryStore(store_name), emptied)) as c:
        save(run, c, 1)
        save(run, c, 2)
        with pytest.raises(SaveError, match=r"\(seq 3\) is written and cannot be resumed: .*00000001.json is missing"):
            save(run, c, 3)
        assert save(run, c, 4) == "base"
    assert_resumes(store_name, run.copy(), 4)


def unreadable(key: str, *, retryable: bool) -> Injector:
    def error(op: Op) -> StorageError:
        return StorageError(f"cannot read {op.key}: InvalidObjectState: it was archived", retryable=retryable)

    return fail(on("get", key), error)


def compacted(store_name: str, steps: int) -> None:
    """A run whose newest checkpoint is read from an equivalent base, above the manifests that it stands for."""
    run = Run(seed=6)
    with checkpointer(run, store_name) as c:
        for step in range(1, steps + 1):
            save(run, c, step)
    compact(Repository(MemoryStore(store_name)))
    prune(Repository(MemoryStore(store_name)), KeepLast(1), dry_run=False)


@pytest.mark.parametrize("retryable", [False, True])
def test_a_manifest_below_the_equivalent_base_that_cannot_be_read_is_needed_by_no_save(
    retryable: bool, run: Run, store_name: str
) -> None:
    compacted(store_name, 4)
    store = FaultStore(MemoryStore(store_name), unreadable("manifests/0000000[123].json", retryable=retryable))
    with checkpointer(run, store) as c:
        c.resume_from_checkpoint()
        assert [save(run, c, step) for step in (5, 6, 7)] == ["delta"] * 3
    assert_resumes(store_name, run.copy(), 7)


def test_what_the_first_save_after_a_resume_reads_does_not_grow_with_the_history(store_name: str) -> None:
    gets: list[str] = []

    def note(op: Op, perform: Perform) -> Any:
        if op.kind in ("get", "list") and op.key.startswith(layout.MANIFESTS):
            gets.append(op.kind)
        return perform(op)

    read = []
    for steps in (4, 12):
        compacted(f"{store_name}-{steps}", steps)
        life = Run(seed=7)
        with checkpointer(life, FaultStore(MemoryStore(f"{store_name}-{steps}"), note)) as c:
            c.resume_from_checkpoint()
            gets.clear()
            assert save(life, c, steps + 1) == "delta"
            assert c._saver._flight is not None
            assert c._saver._flight.written.wait(60)
            read.append([*gets])
    assert read == [["list", "list", "get"]] * 2  # the bases, then the look at what was committed


@pytest.mark.parametrize("unread", ["manifests/00000004.base.json", "manifests/00000004.json"])
@pytest.mark.parametrize("retryable", [False, True])
def test_what_a_delta_counts_from_and_nobody_can_read_any_more_fails_few_saves_and_a_base_follows(
    retryable: bool, unread: str, run: Run, store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compacted(store_name, 4)
    store = FaultStore(MemoryStore(store_name))
    with checkpointer(run, store) as c:
        c.resume_from_checkpoint()
        monkeypatch.setattr("incremental_ckpt.repository.core._KNOWN_MANIFESTS", 1)  # so that it is read again
        c._repository.forget()
        store.inject(unreadable(unread, retryable=retryable))
        if retryable:
            with pytest.raises(SaveError, match="it was archived"):
                save(run, c, 5)
        with pytest.raises(SaveError, match=r"committed nothing.*can be read no more.*it was archived.* is a base"):
            save(run, c, 6)
        assert [save(run, c, step) for step in (7, 8)] == ["base", "delta"]
    assert_resumes(store_name, run.copy(), 6)


def test_a_lost_manifest_that_a_compaction_has_made_up_for_is_missed_by_nobody(run: Run, store_name: str) -> None:
    with checkpointer(run, store_name) as c:
        for step in range(1, 7):
            save(run, c, step)
            if step == 4:
                compact(Repository(MemoryStore(store_name)))
        lose(store_name, "manifests/00000002.json")
        assert [save(run, c, step) for step in (7, 8)] == ["delta"] * 2
        assert_resumes(store_name, run.copy(), 8)
        lose(store_name, "manifests/00000005.json")
        with pytest.raises(SaveError, match=r"is written and cannot be resumed: .*00000005.json is missing"):
            save(run, c, 9)
        assert save(run, c, 10) == "base"


def test_a_compaction_and_a_prune_that_pass_while_a_save_looks_for_its_base_fail_no_save(
    run: Run, store_name: str
) -> None:
    other = Repository(MemoryStore(store_name))
    compacted(store_name, 4)
    compactions = iter((5, 6))

    def passes(op: Op, perform: Perform) -> Any:
        if op.kind == "list" and op.key.startswith(layout.DATA) and (seq := next(compactions, None)) is not None:
            compact(other, seq)
            prune(other, KeepLast(1), dry_run=False)
        return perform(op)

    store = FaultStore(MemoryStore(store_name))
    with checkpointer(run, store) as c:
        c.resume_from_checkpoint()
        assert [save(run, c, step) for step in (5, 6, 7)] == ["delta"] * 3
        store.inject(passes)
        assert save(run, c, 8) == "delta"
        assert next(compactions, None) is None
    assert_resumes(store_name, run.copy(), 8)


def test_a_store_that_does_not_answer_has_lost_nothing(run: Run, store_name: str) -> None:
    def silent(op: Op, perform: Perform) -> Any:
        if op.kind == "list" and op.key.startswith(layout.DATA):
            raise TimeoutError("no answer")
        return perform(op)

    store = FaultStore(MemoryStore(store_name))
    with checkpointer(run, store) as c:
        save(run, c, 1)
        store.inject(silent)
        with pytest.raises(SaveError, match="no answer"):
            save(run, c, 2)
        store.heal()
        assert save(run, c, 3) == "delta"
    assert_resumes(store_name, run.copy(), 2)


@pytest.mark.parametrize("manifests_in_memory", [4096, 1])
def test_looking_takes_one_read_and_one_listing_a_delta_and_one_read_a_base(
    manifests_in_memory: int, run: Run, store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("incremental_ckpt.repository.core._KNOWN_MANIFESTS", manifests_in_memory)
    seen: list[tuple[str, str]] = []

    def note(op: Op, perform: Perform) -> Any:
        if op.kind in ("get", "list"):
            seen.append((op.kind, op.key))
        return perform(op)

    store = FaultStore(MemoryStore(store_name), note)
    with checkpointer(run, store, settings=Settings(low_priority=False)) as c:
        for step, kind in ((1, "base"), (2, "delta"), (3, "delta"), (4, "delta"), (5, "base")):
            seen.clear()
            run.train()
            info = c.save_checkpoint(step, kind="full" if step == 5 else None).wait()
            assert info.kind == kind
            assert c._saver._flight is not None
            assert c._saver._flight.written.wait(60)
            base = layout.attempt_prefix(1, Repository(MemoryStore(store_name)).manifest(1).attempt)
            after = [("list", layout.MANIFESTS), ("get", layout.manifest_key(step))]
            before = [("get", layout.REPO), ("list", base)] if kind == "delta" else [("get", layout.REPO)]
            if step > 1:
                assert seen == [*before, *after]
