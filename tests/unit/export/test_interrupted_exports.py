"""An export that is cut off leaves nothing behind for good: the next one to the same place removes what is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from incremental_ckpt.exporting.beside import hidden_folder


def write_until_told(place: Path, told: Connection) -> None:
    with hidden_folder(place) as folder:
        (folder / place.name).write_bytes(b"half of it")
        told.send(folder)
        told.recv()
        os._exit(130)  # as a second Ctrl-C does


@contextmanager
def another_writer(forks: ForkServerContext, place: Path) -> Iterator[tuple[BaseProcess, Connection, Path]]:
    here, there = forks.Pipe()
    writer = forks.Process(target=write_until_told, args=(place, there))
    writer.start()
    try:
        yield writer, here, here.recv()
    finally:
        writer.kill()
        writer.join()


@pytest.mark.parametrize("death", ["a second Ctrl-C", "SIGKILL"])
def test_what_a_dead_writer_left_goes_with_the_next_write_to_the_same_place(
    forks: ForkServerContext, tmp_path: Path, death: str
) -> None:
    place = tmp_path / "model.pt"
    with another_writer(forks, place) as (writer, told, left):
        if death == "SIGKILL":
            writer.kill()
        else:
            told.send("end")
        writer.join()
        assert writer.exitcode == (-9 if death == "SIGKILL" else 130)
        assert left.is_dir()
        with hidden_folder(tmp_path / "another.pt"):
            assert left.is_dir(), "another place is not ours to sweep"
        with hidden_folder(place) as folder:
            assert [found for found in tmp_path.iterdir() if found != folder] == []
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_writer_that_lives_stays(forks: ForkServerContext, tmp_path: Path) -> None:
    place = tmp_path / "model"
    with another_writer(forks, place) as (_, _, theirs):
        with hidden_folder(place) as ours:
            assert ours != theirs
        assert (theirs / "model").read_bytes() == b"half of it"
        assert list(tmp_path.iterdir()) == [theirs]


def test_a_folder_whose_writer_died_before_its_lock_goes_and_what_only_looks_alike_stays(tmp_path: Path) -> None:
    (tmp_path / f".model.ickpt-{'0' * 16}").mkdir()
    mine = [tmp_path / ".model-settings", tmp_path / ".model.ickpt-mine", tmp_path / f".model.ickpt-{'1' * 16}"]
    for folder in mine:
        folder.mkdir()
        (folder / "kept").write_bytes(b"mine")
    with hidden_folder(tmp_path / "model"):
        pass
    assert sorted(tmp_path.iterdir()) == sorted(mine)
    assert all((folder / "kept").read_bytes() == b"mine" for folder in mine)


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.lock").write_bytes(b"")
    link = tmp_path / f".model.ickpt-{'2' * 16}"
    link.symlink_to(elsewhere)
    with hidden_folder(tmp_path / "model"):
        pass
    assert (elsewhere / "model.lock").exists()
    assert link.is_symlink()


def test_a_writer_that_is_swept_before_it_has_its_lock_makes_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, swept = os.open, []

    def sweep_first(path: Any, *arguments: Any, **named: Any) -> int:
        if not swept:
            swept.append(Path(path).parent)
            swept[0].rmdir()
        return real(path, *arguments, **named)

    monkeypatch.setattr("incremental_ckpt.exporting.beside.os.open", sweep_first)
    with hidden_folder(tmp_path / "model") as folder:
        assert folder != swept[0]
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []
