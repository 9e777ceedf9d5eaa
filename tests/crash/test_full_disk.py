"""The disk fills up in the middle of a save: SaveError, training goes on, and the next save has all rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from full_disks import FullDisk, limited_files, small_disk
from lives import TINY
from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, Repository, SaveError, Settings, StorageError
from incremental_ckpt.storage import LocalStore, Store
from incremental_ckpt.storage.fsspec import FsspecStore

STREAMED = Settings(
    pack_bytes=8000, entry_bytes=2048, snapshot_bytes=1, preimage_bytes=4000, low_priority=False, read_threads=1
)
ROOMS = range(0, 20, 2)


@pytest.fixture(params=[small_disk, limited_files], ids=["full", "no large files"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FullDisk]:
    with request.param(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture(params=["local", "fsspec"])
def store(request: pytest.FixtureRequest, disk: FullDisk) -> Store:
    folder = disk.folder / "run"
    if request.param == "local":
        return LocalStore(folder)
    with pytest.warns(match="make sure that there is one"):
        return FsspecStore(f"file://{folder}")


@pytest.mark.parametrize("settings", [TINY, STREAMED], ids=["copied", "streamed"])
@pytest.mark.parametrize("kind", ["full", "consecutive"])
def test_a_save_without_room_is_a_save_error_and_the_next_one_commits_all_rows(
    disk: FullDisk, store: Store, kind: str, settings: Settings
) -> None:
    run = Run()
    steps, refused = [1], 0
    with Checkpointer(run.model, store, **run.arguments, settings=settings) as checkpointer:
        run.train()
        checkpointer.save_checkpoint(1).wait()
        for pages in ROOMS:
            run.train()
            with disk.room_for(pages):
                handle = checkpointer.save_checkpoint(run.steps_done, kind=kind)  # type: ignore[arg-type]
                run.train()  # beside the save that fails
                try:
                    steps.append(handle.wait().step)
                except SaveError as error:
                    refused += 1
                    assert isinstance(error.__cause__, StorageError)
                    assert str(disk.folder) in str(error)
        run.train()
        checkpointer.save_checkpoint(run.steps_done, kind="consecutive").wait()
        steps.append(run.steps_done)
    assert refused > 1
    repository = Repository(store)
    assert repository.check(deep=True).problems == ()
    assert [one.step for one in repository.checkpoints()] == steps
    heir = Run(seed=3)
    with Checkpointer(heir.model, store, **heir.arguments) as checkpointer:
        assert checkpointer.resume_from_checkpoint() is not None
    assert_same(heir.copy(), run.copy())


def test_what_is_told_of_a_full_disk_is_what_to_do(tmp_path: Path) -> None:
    run = Run()
    with (
        small_disk(tmp_path / "disk") as disk,
        Checkpointer(run.model, LocalStore(disk.folder / "run"), **run.arguments) as checkpointer,
    ):
        with disk.room_for(0), pytest.raises(SaveError, match=r"the disk is full: free space or prune|raise the limit"):
            checkpointer.save_checkpoint(1).wait()
        assert not list(disk.folder.rglob(".tmp-*"))
        checkpointer.save_checkpoint(1).wait()
