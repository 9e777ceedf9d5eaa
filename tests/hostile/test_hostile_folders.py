"""A repository in a folder whose files are links, loops, pipes or huge: nothing outside its root is read or written."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from bounds import bounded_memory
from forgery import Objects, honest, key_of
from small_runs import Run
from test_hostile_repositories import readers, spread

from incremental_ckpt import CheckpointError, CorruptionError, Repository, StorageError
from incremental_ckpt.format import layout
from incremental_ckpt.storage import LocalStore, Store
from incremental_ckpt.storage.fsspec import FsspecStore

SECRET = b"secret " * 1000

Setting = Callable[[Path, Path, str], None]
"""``(root, outside, key)``: puts something hostile in the place of an object, or of the folder that it is in."""


def file_link(root: Path, outside: Path, key: str) -> None:
    (root / key).rename(outside / "object")
    (root / key).symlink_to(outside / "object")


def link_to_a_secret(root: Path, outside: Path, key: str) -> None:
    (root / key).unlink()
    (root / key).symlink_to(outside / "secret")


def link_upwards(root: Path, outside: Path, key: str) -> None:
    (root / key).unlink()
    (root / key).symlink_to("../../outside/secret")


def link_to_itself(root: Path, outside: Path, key: str) -> None:
    (root / key).unlink()
    (root / key).symlink_to(root / key)


def folder_link(root: Path, outside: Path, key: str) -> None:
    folder = (root / key).parent
    folder.rename(outside / "folder")
    folder.symlink_to(outside / "folder")


def loop_of_folders(root: Path, outside: Path, key: str) -> None:
    (root / key).parent.joinpath("loop").symlink_to(root)
    (root / "data" / "loop").symlink_to("..")


def pipe(root: Path, outside: Path, key: str) -> None:
    (root / key).unlink()
    os.mkfifo(root / key)


def folder_instead(root: Path, outside: Path, key: str) -> None:
    (root / key).unlink()
    (root / key).mkdir()
    (root / key / "x").write_bytes(b"1")


def huge_file(root: Path, outside: Path, key: str) -> None:
    """Sparse: it takes no room on the disk, and would take a terabyte in memory."""
    os.truncate(root / key, 1 << 40)


SETTINGS = {
    one.__name__: one
    for one in (
        file_link, link_to_a_secret, link_upwards, link_to_itself, folder_link, loop_of_folders, pipe, folder_instead,
        huge_file,
    )
}  # fmt: skip
WHERE = ("repo", "manifest", "rank", "pack", "resume")


@pytest.fixture(scope="module")
def past() -> Objects:
    return honest()


@pytest.fixture(scope="module")
def victim() -> Run:
    return Run("adagrad", 21)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(SECRET)
    return outside


def spread_with_a_marker(objects: Objects, root: Path) -> None:
    spread(objects, root)
    marker = root / layout.resume_key("0123456789abcdef", 1)
    marker.parent.mkdir(exist_ok=True)
    marker.write_bytes(b"{}")


def seen(folder: Path) -> dict[str, tuple[bytes, int]]:
    """What lies in a folder, and when it was last written."""
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()
    }


def place_of(objects: Objects, what: str) -> str:
    if what == "repo":
        return layout.REPO
    if what == "resume":
        return layout.resume_key("0123456789abcdef", 1)
    return key_of(objects, what, 1)


@pytest.mark.parametrize("what", WHERE)
@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_outside_the_root_is_read_or_written(
    setting: str, what: str, past: Objects, victim: Run, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting == "folder_link" and what == "repo":
        what = "pack"  # the root itself may be a link
    root, scratch = tmp_path / "run", tmp_path / "out"
    scratch.mkdir()
    spread_with_a_marker(past, root)
    SETTINGS[setting](root, outside, place_of(past, what))
    before, opened = seen(outside), set[str]()
    real = os.open

    def watching_open(*arguments: object, **options: object) -> int:
        fd: int = real(*arguments, **options)  # type: ignore[arg-type]
        opened.add(os.readlink(f"/proc/self/fd/{fd}"))
        return fd

    monkeypatch.setattr(os, "open", watching_open)
    for read in readers(victim, scratch).values():
        with bounded_memory(), suppress(CheckpointError):
            read(LocalStore(root))
    assert {path for path in opened if path.startswith(str(outside))} == set()
    assert seen(outside) == before


@pytest.mark.parametrize("setting", ["link_to_a_secret", "link_upwards", "folder_link"])
def test_a_repository_behind_fsspecs_folder_is_no_way_out_either(
    setting: str, past: Objects, outside: Path, tmp_path: Path
) -> None:
    spread(past, tmp_path / "run")
    key = place_of(past, "pack")
    SETTINGS[setting](tmp_path / "run", outside, key)
    with pytest.warns(match="make sure that there is one"):
        store: Store = FsspecStore(f"file://{tmp_path}/run")
    for operation in (
        lambda: store.get(key),
        lambda: store.put(key, [b"1"]),
        lambda: store.put_if_absent(key, [b"1"]),
        lambda: store.put(f"{key.rpartition('/')[0]}/new", [b"1"]) if setting == "folder_link" else store.get(key),
    ):
        with pytest.raises(StorageError, match="link"):
            operation()
    before = seen(outside)
    with suppress(StorageError):
        store.delete([key])
    with suppress(StorageError):
        assert not any("secret" in one.key or "folder" in one.key for one in store.list())
    assert seen(outside) == before


def test_a_manifest_too_large_to_be_one_is_refused_before_it_is_read(past: Objects, tmp_path: Path) -> None:
    spread(past, tmp_path / "run")
    key = layout.manifest_key(3)
    os.truncate(tmp_path / "run" / key, 1 << 40)
    with pytest.raises(CorruptionError, match="too large") as caught:
        Repository(LocalStore(tmp_path / "run")).newest()
    assert caught.value.key == key
