"""Compaction, prune and a trainer side by side: each dies at every write, and each meets the others at every operation.

Invariants by name: docs/format.md, section 10. KEEP: a prune drops none of the newest it was told to keep.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from lives import TINY, copy_of
from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, Repository
from incremental_ckpt.compaction import compact, cut, part
from incremental_ckpt.errors import NotFoundError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import RankManifest
from incremental_ckpt.policy import KeepLast
from incremental_ckpt.pruning import prune
from incremental_ckpt.repository.records import SpanReader, TableRecords
from incremental_ckpt.storage import MemoryStore, Store
from incremental_ckpt.testing import Crash, CrashStore, FaultStore, Op, Perform, TracingStore

Tool = Callable[[Store], object]
Values = Mapping[tuple[str, str], bytes]
KINDS = {1: "full", 2: "consecutive", 3: "one-shot", 4: "consecutive", 5: "consecutive", 6: "one-shot"}
PARENTS = {1: None, 2: 1, 3: 2, 4: 2, 5: 4, 6: 5}


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several windows and packs even for small tables."""
    monkeypatch.setattr(cut, "ENTRY_BYTES", 512)
    monkeypatch.setattr(part, "PACK_BYTES", 2048)


@dataclass(frozen=True)
class History:
    """A run that saved six times, what it was then, and what each checkpoint reads as."""

    store: MemoryStore
    truth: Mapping[int, Any]
    values: Mapping[int, Values]


@cache
def parsed(raw: bytes, key: str) -> RankManifest:
    return RankManifest.from_bytes(raw, key)


def values(store: Store, seq: int) -> Values:
    """Every field of every table as a checkpoint reads; everything that its chain names must be there."""
    repository = Repository(store)
    links = repository.links(seq)
    there = {o.key: o.size for o in store.list(layout.DATA)}
    ranks = [[parsed(bytes(store.get(ref.key)), ref.key) for ref in link.tables.ranks] for link in links]
    own = [parsed(bytes(store.get(ref.key)), ref.key) for ref in links[-1].manifest.ranks]
    assert all(there.get(p.key) == p.size for rank in (*own, *(r for link in ranks for r in link)) for p in rank.packs)
    reader, found = SpanReader(repository, 1 << 20), dict[tuple[str, str], bytes]()
    for name in sorted({s.shard.table for rank in ranks[-1] for s in rank.shards}):
        table = TableRecords(reader, ranks, name)
        for field in table.shards[0].fields:
            found[name, field.name] = table.values(field.name, range(table.shards[0].table_rows)).tobytes()
    return found


@pytest.fixture(scope="module")
def history() -> History:
    store, run = MemoryStore(), Run("adagrad")
    states: dict[int, Any] = {}
    with Checkpointer(run.model, store, **run.arguments, settings=TINY) as ckpt:
        for step, kind in KINDS.items():
            run.train()
            ckpt.save_checkpoint(step, kind=kind).wait()  # type: ignore[arg-type]
            states[step] = run.copy()
        for step in (7, 8):
            run.train()
            states[step] = run.copy()
    repository = Repository(store)
    assert {i.seq: i.parent for i in repository.checkpoints()} == PARENTS
    found = {seq: values(store, seq) for seq in KINDS}
    for seq in KINDS:
        assert all(repository.read_table(t, seq, field=f).tobytes() == raw for (t, f), raw in found[seq].items())
    return History(store, states, found)


def tidy(seq: int | None = None) -> Tool:
    return lambda store: compact(Repository(store), seq)


def keeping(count: int) -> Tool:
    return lambda store: prune(Repository(store), KeepLast(count), dry_run=False)


def upkeep(store: Store) -> None:
    """What a cron job may do: compact here and there, and keep fewer and fewer."""
    for tool in (tidy(5), keeping(3), tidy(), keeping(2), tidy(4), keeping(1)):
        with suppress(NotFoundError):
            tool(store)


def all_right(history: History, store: Store, *, least: set[int]) -> tuple[int, ...]:
    """I1, I3 and I6 of all that is visible, and that at least ``least`` is; the visible numbers."""
    seqs = Repository(store).listing().seqs
    assert least <= set(seqs)
    for seq in seqs:
        found = values(store, seq)
        assert seq not in history.values or found == history.values[seq], f"seq {seq} reads as another state"
    return seqs


def resumes(history: History, store: Store, step: int) -> None:
    heir = Run("adagrad", seed=5)
    with Checkpointer(heir.model, store, **heir.arguments, settings=TINY) as ckpt:
        progress = ckpt.resume_from_checkpoint()
        assert progress is not None
        assert progress.step == step
    assert_same(heir.copy(), history.truth[step])


def test_upkeep_that_dies_at_any_write_leaves_what_it_should_and_the_next_one_finishes(history: History) -> None:
    undisturbed = copy_of(history.store)
    alive = CrashStore(undisturbed)
    upkeep(alive)
    final = {o.key for o in undisturbed.list() if not o.key.startswith(layout.RESUMES)}
    for k in range(1, alive.writes + 1):
        for landed in (False, True):
            store = copy_of(history.store)
            dying = CrashStore(store, die_at=k, landed=landed)
            with pytest.raises(Crash):
                upkeep(dying)
            all_right(history, store, least={5, 6})
            upkeep(store)
            assert all_right(history, store, least={5, 6}) == (5, 6)
            left = {o.key for o in store.list()} - final
            assert not left, "something that nobody needs is left for ever"
            if landed:
                assert Repository(store).check(deep=True).problems == ()
                resumes(history, store, 6)
    assert alive.writes > 30
    print(f"{2 * alive.writes} deaths")


def operations(store: Store, tool: Tool) -> int:
    tracing = TracingStore(copy_of(store))
    with suppress(NotFoundError):
        tool(tracing)
    return len(tracing.trace)


def meeting(store: Store, at: int, other: Callable[[], object]) -> FaultStore:
    """A view of the store in which ``other`` happens just before the ``at``-th operation."""

    def meet(op: Op, perform: Perform) -> Any:
        if op.index == at:
            other()
        return perform(op)

    return FaultStore(store, meet)


PAIRS: Mapping[str, tuple[Tool, Tool, set[int]]] = {
    "a prune passes a compaction": (tidy(), keeping(1), {6}),
    "a prune takes what is being compacted": (tidy(3), keeping(1), {6}),
    "a compaction passes a prune": (keeping(2), tidy(5), {5, 6}),
    "a compaction of the newest passes a prune": (keeping(1), tidy(), {6}),
    "a prune that keeps less passes a prune": (keeping(2), keeping(1), {6}),
    "a prune that keeps more passes a prune": (keeping(1), keeping(3), {6}),
    "two compactions of one checkpoint": (tidy(), tidy(), set(KINDS)),
    "two compactions of one chain": (tidy(), tidy(4), set(KINDS)),
    "upkeep passes upkeep": (upkeep, upkeep, {6}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_tools_may_meet_at_any_operation(history: History, name: str) -> None:
    first, second, least = PAIRS[name]
    count = operations(history.store, first)
    for at in range(1, count + 1, 1 if count < 40 else 2 if count < 100 else 3):
        store = copy_of(history.store)
        with suppress(NotFoundError):  # what is being compacted may be forgotten meanwhile
            first(meeting(store, at, lambda store=store: second(store)))  # type: ignore[misc]
        all_right(history, store, least=least)


@pytest.mark.parametrize("name", ["compact", "prune"])
def test_a_trainer_may_save_at_any_operation_of_a_tool(history: History, name: str) -> None:
    tool: Tool = {"compact": tidy(), "prune": keeping(1)}[name]
    every = 1 if name == "prune" else 5
    for at in range(1, operations(history.store, tool) + 1, every):
        store = copy_of(history.store)
        run = Run("adagrad", seed=5)
        with Checkpointer(run.model, store, **run.arguments, settings=TINY) as ckpt:
            assert ckpt.resume_from_checkpoint() is not None

            def save(step: int, run: Run = run, ckpt: Checkpointer = ckpt) -> None:
                run.train()
                ckpt.save_checkpoint(step, kind="one-shot" if step == 7 else "consecutive").wait()

            tool(meeting(store, at, lambda save=save: save(7)))  # type: ignore[misc]
            all_right(history, store, least={6, 7})
            save(8)
        all_right(history, store, least={6, 7, 8})
        resumes(history, store, 8)


def lives(history: History, seed: int) -> Iterator[str]:
    """A random life of the store: tools and trainers one after another, any of which may die or be met by another."""
    draw, store = random.Random(seed), copy_of(history.store)
    newest = 6
    for _ in range(8):
        count = draw.choice((1, 2, 3))
        tool = draw.choice((keeping(count), tidy(), tidy(draw.randint(1, newest)), upkeep))
        other = draw.choice((keeping(draw.choice((1, 2))), tidy(), upkeep))
        view: Store = store
        if draw.random() < 0.5:
            view = meeting(store, draw.randint(1, 60), lambda other=other: other(store))  # type: ignore[misc]
        dying = CrashStore(view, die_at=draw.randint(1, 12) if draw.random() < 0.5 else 0, landed=draw.random() < 0.5)
        with suppress(NotFoundError, Crash):
            tool(dying)
        if newest < 8 and draw.random() < 0.3:
            run = Run("adagrad", seed=5)
            with Checkpointer(run.model, store, **run.arguments, settings=TINY) as ckpt:
                assert ckpt.resume_from_checkpoint() is not None
                run.train()
                newest += 1
                ckpt.save_checkpoint(newest, kind=draw.choice(("one-shot", "consecutive", "full"))).wait()
            yield "saved"
        all_right(history, store, least={newest})
        yield "died" if dying.crashed else "done"
    assert Repository(store).check(deep=True).problems == ()
    resumes(history, store, newest)


def test_random_lives_never_lose_the_newest_nor_change_a_state(history: History) -> None:
    seen = [what for seed in range(12) for what in lives(history, seed)]
    assert {"saved", "died", "done"} <= set(seen)
