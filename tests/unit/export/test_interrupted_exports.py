"""An export that is cut off leaves nothing behind for good, and none replaces what exists: the step to its name."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from incremental_ckpt.exporting.beside import WRITTEN, hidden_folder, publish, sweep


def write_until_told(place: Path, told: Connection) -> None:
    with hidden_folder(place) as folder:
        (folder / WRITTEN).write_bytes(b"half of it")
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
        assert (theirs / WRITTEN).read_bytes() == b"half of it"
        assert list(tmp_path.iterdir()) == [theirs]


def test_a_folder_whose_writer_died_before_its_lock_goes_and_what_only_looks_alike_stays(tmp_path: Path) -> None:
    with hidden_folder(tmp_path / "model") as folder:
        prefix = folder.name[:-16]
    (tmp_path / f"{prefix}{'0' * 16}").mkdir()
    mine = [tmp_path / ".model-settings", tmp_path / ".ickpt-mine", tmp_path / f"{prefix}{'1' * 16}"]
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
    (elsewhere / "lock").write_bytes(b"")
    with hidden_folder(tmp_path / "model") as folder:
        link = tmp_path / f"{folder.name[:-16]}{'2' * 16}"
    link.symlink_to(elsewhere)
    with hidden_folder(tmp_path / "model"):
        pass
    assert (elsewhere / "lock").exists()
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


Write = Callable[[Path], object]


def write_file(path: Path) -> None:
    path.write_bytes(b"all of it")


def write_folder(path: Path) -> None:
    path.mkdir()
    (path / "part").write_bytes(b"all of it")


def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("incremental_ckpt.exporting.beside.os.link", refuse)


KINDS = pytest.mark.parametrize(
    ("write", "links"), [(write_file, True), (write_file, False), (write_folder, True)],
    ids=["a file", "a file without links", "a folder"],
)  # fmt: skip


def taken_by_a_file(path: Path) -> None:
    path.write_bytes(b"mine")


def taken_by_a_link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def content(path: Path) -> object:
    if path.is_symlink():
        return path.readlink()
    return path.read_bytes() if path.is_file() else sorted((f.name, f.read_bytes()) for f in path.iterdir())


@KINDS
@pytest.mark.parametrize("take", [taken_by_a_file, taken_by_a_link_to_nothing, Path.mkdir, Path.touch, write_folder])
def test_what_exists_by_the_end_stays_whatever_it_is(
    write: Write, links: bool, take: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        no_links(monkeypatch)
    place = tmp_path / "model"
    with hidden_folder(place) as folder:
        write(folder / WRITTEN)
        take(place)
        before = content(place), place.lstat().st_ino
        assert not publish(folder, place)
    assert (content(place), place.lstat().st_ino) == before
    assert list(tmp_path.iterdir()) == [place]


@KINDS
def test_what_was_written_has_the_name_and_nothing_else_is_left(
    write: Write, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        no_links(monkeypatch)
    place, expected = tmp_path / "model", tmp_path / "expected"
    write(expected)
    with hidden_folder(place) as folder:
        write(folder / WRITTEN)
        assert publish(folder, place)
    assert content(place) == content(expected)
    assert place.stat().st_mode == expected.stat().st_mode
    assert sorted(tmp_path.iterdir()) == [expected, place]


def test_a_folder_that_somebody_fills_before_it_is_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, real = tmp_path / "model", Path.mkdir

    def mkdir_and_fill(path: Path, *arguments: Any, **named: Any) -> None:
        real(path, *arguments, **named)
        if path == place:
            (path / "theirs").write_bytes(b"mine")

    with hidden_folder(place) as folder:
        write_folder(folder / WRITTEN)
        monkeypatch.setattr(Path, "mkdir", mkdir_and_fill)
        assert not publish(folder, place)
    assert content(place) == [("theirs", b"mine")]


def publish_and_die(place: Path, kind: str, when: str) -> None:
    """At one moment of the step, as SIGKILL does."""
    if kind == "a file without links":
        no_links(pytest.MonkeyPatch())
    replace = Path.replace

    def die(written: Path, target: Path) -> None:
        if when == "after":
            replace(written, target)
        os._exit(9)

    Path.replace = die  # type: ignore[assignment,method-assign]
    with hidden_folder(place) as folder:
        (write_folder if kind == "a folder" else write_file)(folder / WRITTEN)
        publish(folder, place)


@pytest.mark.parametrize("kind", ["a folder", "a file without links"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_claim_of_a_dead_writer_goes_and_what_it_wrote_whole_stays(
    forks: ForkServerContext, tmp_path: Path, kind: str, when: str
) -> None:
    place = tmp_path / "model"
    writer = forks.Process(target=publish_and_die, args=(place, kind, when))
    writer.start()
    writer.join()
    assert writer.exitcode == 9
    assert place.exists()
    sweep(place)
    whole = b"all of it" if kind != "a folder" else [("part", b"all of it")]
    assert [content(found) for found in tmp_path.iterdir()] == ([] if when == "before" else [whole])


@pytest.mark.parametrize("take", [write_file, write_folder, taken_by_a_link_to_nothing])
def test_what_took_the_place_of_a_dead_writers_claim_stays(
    forks: ForkServerContext, tmp_path: Path, take: Write
) -> None:
    place = tmp_path / "model"
    writer = forks.Process(target=publish_and_die, args=(place, "a folder", "before"))
    writer.start()
    writer.join()
    place.rmdir()
    take(place)
    before = content(place)
    sweep(place)
    assert [content(found) for found in tmp_path.iterdir()] == [before]
