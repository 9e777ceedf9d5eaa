"""Exports and imports tell how many bytes are done, and of how many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chains import Chain, shard

from incremental_ckpt import Repository
from incremental_ckpt.compaction import compact
from incremental_ckpt.exporting import content, export
from incremental_ckpt.importing import import_checkpoint
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore, damage, on

WEIGHTS, MOMENTA = 400 * 8 * 4 + 50 * 4 * 4, (400 + 50) * 4
Told = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "CHUNK_BYTES", 2000)
    monkeypatch.setattr("incremental_ckpt.importing._PACK_BYTES", 4000)
    monkeypatch.setattr("incremental_ckpt.importing._ENTRY_BYTES", 1000)


@pytest.fixture
def repository() -> Repository:
    chain = Chain()
    users, items = shard("users", 400, 8), shard("items", 50, 4)
    chain.save([[(users, range(400)), (items, range(50))]], state=True)
    chain.save([[(users, range(7)), (items, range(3))]], state=True)
    return chain.repository


def grows_to(total: int, told: Told) -> bool:
    done = [each for each, _ in told]
    return {of for _, of in told} == {total} and done == sorted(done) and done[0] < total and done[-1] == total


@pytest.mark.parametrize("optimizer", [False, True], ids=["model", "with optimizers"])
@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
def test_an_export_counts_every_row_that_it_writes_once(
    form: Any, optimizer: bool, repository: Repository, tmp_path: Path
) -> None:
    told: Told = []
    export(repository, tmp_path / "out", form, optimizer=optimizer, progress=lambda *state: told.append(state))
    assert grows_to(WEIGHTS + MOMENTA * optimizer, told)
    assert len(told) > 6, "it moves within a table"


def test_an_export_that_has_to_read_anew_counts_anew(tmp_path: Path) -> None:
    chain = Chain()
    one, other = shard("a", 400, 8), shard("z", 400, 8)
    chain.save([[(one, range(400)), (other, range(400))]], state=True)
    chain.save([[(one, range(7)), (other, range(3))]], state=True)
    compact(chain.repository)
    entry = chain.repository.rank_manifests(chain.repository.links(2)[0].tables)[0].shards[1].entries[0].at
    broken = damage(on("get", "data/00000002-c*.safetensors"), entry.begin)
    told: Told = []
    export(Repository(FaultStore(chain.repository.store, broken)), tmp_path / "out",
           progress=lambda *state: told.append(state))  # fmt: skip
    total = 2 * 400 * 8 * 4
    again = next(at for at in range(1, len(told)) if told[at][0] < told[at - 1][0])
    assert told[again - 1][0] < total
    assert grows_to(total, told[again:])


@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
@pytest.mark.parametrize("tables", [None, []], ids=["tables", "no tables"])
def test_an_import_counts_what_it_writes(
    form: Any, tables: list[str] | None, repository: Repository, tmp_path: Path
) -> None:
    export(repository, tmp_path / "out", form, optimizer=True)
    told: Told = []
    store = MemoryStore()
    report = import_checkpoint(
        tmp_path / "out", Repository(store), tables=tables, progress=lambda *state: told.append(state)
    )
    written = sum(one.size for one in store.list("data/"))
    assert told[-1][0] == told[-1][1]
    assert WEIGHTS + MOMENTA * bool(report.tables) <= told[-1][1] <= written
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len({done for done, _ in told}) > (4 if report.tables else 0)


@pytest.mark.parametrize("given", [3, "x", []], ids=repr)
def test_a_progress_that_cannot_be_called_is_refused_by_name(
    given: Any, repository: Repository, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="progress takes a function of bytes done and bytes in all"):
        export(repository, tmp_path / "out", progress=given)
    with pytest.raises(TypeError, match="progress takes a function of bytes done and bytes in all"):
        import_checkpoint(tmp_path, repository, progress=given)
    assert not list(tmp_path.iterdir())
