"""Runs that die at random writes until they are done, over every store; ``make crash-loop`` makes it a long run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest
from crash_loop import SHARES, Tally
from places import BUCKET_ON_LOOPBACK, PLACES
from random_deaths import deaths_over

from incremental_ckpt.storage import Buffer
from incremental_ckpt.testing import FaultStore
from incremental_ckpt.tracker import Tracker

DEATHS = {"memory": 60, "local": 20, "fsspec-memory": 20, "fsspec-file": 12, "s3": 4}


@pytest.fixture(scope="module", autouse=True)
def _bucket() -> object:
    yield
    BUCKET_ON_LOOPBACK.stop()


@pytest.mark.parametrize("name", PLACES)
def test_runs_that_die_at_random_writes_lose_nothing_over_any_store(name: str, tmp_path: Path) -> None:
    deaths = deaths_over(PLACES[name], tmp_path, count(), DEATHS[name])
    trainers = sum(number for kind, number in deaths.items() if kind.startswith("training"))
    assert trainers > 0
    assert deaths.total() >= DEATHS[name]
    print(f"{name}: {deaths.total()} deaths, {deaths.total() - trainers} of them of upkeep")


def a_failed_save_drops_its_marks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tracker, "give_back", Tracker.confirm)


def packs_come_after_the_manifest(patch: pytest.MonkeyPatch) -> None:
    late: list[tuple[FaultStore, str, list[bytes]]] = []
    put, put_if_absent = FaultStore.put, FaultStore.put_if_absent

    def put_later(store: FaultStore, key: str, parts: Sequence[Buffer]) -> None:
        if key.endswith(".safetensors"):
            late.append((store, key, [bytes(part) for part in parts]))
        else:
            put(store, key, parts)

    def put_then(store: FaultStore, key: str, parts: Sequence[Buffer]) -> bool:
        created = put_if_absent(store, key, parts)
        while late:
            put(*late.pop(0))
        return created

    patch.setattr(FaultStore, "put", put_later)
    patch.setattr(FaultStore, "put_if_absent", put_then)


@pytest.mark.parametrize("mistake", [a_failed_save_drops_its_marks, packs_come_after_the_manifest])
def test_the_loop_notices_a_mistake_in_the_protocol(
    mistake: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        deaths_over(PLACES["memory"], tmp_path, count(), 200)


def test_the_long_run_leaves_no_store_out() -> None:
    assert SHARES.keys() == PLACES.keys()
    assert sum(SHARES.values()) == pytest.approx(1.0)


def test_the_long_run_goes_on_from_its_tally(tmp_path: Path) -> None:
    tally = Tally(400)
    tally.add("memory", Counter({"training, writing pack, lost": 3}), 1.5)
    tally.add("s3", Counter({"prune, writing gone, landed": 1}), 2.0)
    tally.add("memory", Counter({"training, writing pack, lost": 2}), 0.5)
    tally.write(tmp_path / "tally.json")
    assert Tally.read(tmp_path / "tally.json") == tally
    assert tally.total == 6
    assert "memory               5 deaths        2 s, nothing lost (training 5)" in tally.table()
