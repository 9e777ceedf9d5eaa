"""The process dies at the k-th write, for every k, landed or not: what survives is a right state, and nothing is lost.

Invariants by name: docs/format.md, section 10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lives import Script, live, writes_of
from small_runs import assert_same, truth

from incremental_ckpt import Repository, Settings
from incremental_ckpt.storage import LocalStore, MemoryStore, Store
from incremental_ckpt.testing import CrashStore

MIXED = {1: "consecutive", 2: "one-shot", 3: "consecutive", 4: "full", 5: "consecutive"}
STREAMED = Settings(
    pack_bytes=2500, entry_bytes=1024, snapshot_bytes=1, preimage_bytes=900, low_priority=False, read_threads=1
)
SCRIPTS = {
    "adagrad, every save waited for": Script("adagrad", 6, MIXED, frozenset(MIXED)),
    "fused, saves in the background": Script("fused", 6, MIXED, frozenset()),
    "sparse adam, some waited for": Script(
        "sparse_adam", 6, {1: "full", 2: "one-shot", 4: "consecutive"}, frozenset({2})
    ),
    "dense gradients, streamed deltas": Script(
        "dense_gradients", 6, {1: "intermittent", 3: "consecutive", 5: "one-shot"}, frozenset({3}), STREAMED
    ),
}
TRUTHS = {name: truth(script.layout, script.steps) for name, script in SCRIPTS.items()}


def whole(store: Store) -> Repository:
    """I1, I3 and coverage of every visible checkpoint, every checksum included."""
    repository = Repository(store)
    report = repository.check(deep=True)
    assert report.problems == ()
    return repository


def die_everywhere(script: Script, states: Sequence[Mapping[str, Any]], new_store: Callable[[], Store]) -> int:
    """Every k, landed or not; the number of deaths."""
    deaths = 0
    for k in range(1, writes_of(script, new_store(), states) + 1):
        for landed in (False, True):
            store = new_store()
            dying = CrashStore(store, die_at=k, landed=landed)
            dead = live(script, dying, states, seed=0)
            assert dying.crashed
            deaths += 1
            survivors = {i.step for i in whole(store).checkpoints()}
            assert survivors >= set(dead.acknowledged), "an acknowledged commit is lost"
            heir = live(script, store, states, seed=13)
            assert heir.state is not None, "the run cannot go on"
            assert (heir.resumed or 0) == max(survivors, default=0)
            assert_same(heir.state, states[script.steps])
            steps = [i.step for i in Repository(store).checkpoints()]
            assert steps == sorted(script.saves), "a save was lost or made twice"
    return deaths


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_death_at_any_write_leaves_a_right_state_and_the_run_goes_on(name: str) -> None:
    deaths = die_everywhere(SCRIPTS[name], TRUTHS[name], MemoryStore)
    assert deaths >= 20
    print(f"{deaths} deaths")


def test_a_death_at_any_write_to_a_folder_leaves_a_right_state(tmp_path: Path) -> None:
    script = Script("adagrad", 3, {1: "full", 2: "consecutive"}, frozenset({1}), Settings(low_priority=False))
    folders = iter(range(1000))
    deaths = die_everywhere(script, truth("adagrad", 3), lambda: LocalStore(tmp_path / str(next(folders))))
    assert deaths >= 10
    print(f"{deaths} deaths")


def test_deaths_of_life_after_life_never_lose_ground() -> None:
    name = "adagrad, every save waited for"
    script, states = SCRIPTS[name], TRUTHS[name]
    deaths = 0
    for stride in (11, 13):
        store, ground = MemoryStore(), 0
        for number in range(200):
            dying = CrashStore(store, die_at=stride + number % 3, landed=bool(number % 2))
            life = live(script, dying, states, seed=number)
            assert (life.resumed or 0) >= ground, "an acknowledged commit is lost"
            ground = max([ground, *life.acknowledged])
            whole(store)
            if not dying.crashed:
                break
            deaths += 1
        assert life.state is not None, "the run never ends"
        assert_same(life.state, states[script.steps])
    assert deaths >= 6
    print(f"{deaths} deaths")
