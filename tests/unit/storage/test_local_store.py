"""What a folder must do beyond the conformance tests: survive crashes, refuse links, say what the system refused."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from incremental_ckpt.errors import ConflictError, CorruptionError, NotFoundError, StorageError
from incremental_ckpt.storage import LocalStore, directio, local

LARGE = bytes(range(251)) * 20_001  # more than one bounce buffer, and no multiple of a block


def keys(store: LocalStore, prefix: str = "") -> list[str]:
    return [one.key for one in store.list(prefix)]


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob(".tmp-*"))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


class TestConstruction:
    def test_opening_and_reading_creates_nothing(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "a" / "b")
        assert keys(store) == []
        assert store.sweep() == 0
        store.delete(["x/y"])
        with pytest.raises(NotFoundError):
            store.get("x")
        assert list(tmp_path.iterdir()) == []

    def test_the_first_write_makes_the_folder(self, tmp_path: Path) -> None:
        LocalStore(tmp_path / "a" / "b").put("x", [b"1"])
        assert (tmp_path / "a" / "b" / "x").read_bytes() == b"1"

    @pytest.mark.parametrize("below", ["file", "file/below/it"])
    def test_a_file_where_the_folder_should_be_is_refused(self, tmp_path: Path, below: str) -> None:
        (tmp_path / "file").write_bytes(b"")
        for read_only in (False, True):
            with pytest.raises(StorageError, match=r"file is not a folder"):
                LocalStore(tmp_path / below, read_only=read_only)

    def test_a_place_that_cannot_be_written_is_refused_unless_read_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []
        monkeypatch.setattr(os, "access", lambda path, mode: asked.append(Path(path)))
        with pytest.raises(StorageError, match=r"not writable.*read_only=True"):
            LocalStore(tmp_path / "a" / "b")
        assert asked == [tmp_path]  # the nearest folder that exists
        assert keys(LocalStore(tmp_path / "a" / "b", read_only=True)) == []

    def test_a_read_only_store_reads_and_never_writes(self, store: LocalStore, tmp_path: Path) -> None:
        store.put("a", [b"1"])
        reader = LocalStore(tmp_path / "run", read_only=True)
        assert bytes(reader.get("a")) == b"1"
        for write in (
            lambda: reader.put("b", [b""]),
            lambda: reader.put_if_absent("b", [b""]),
            lambda: reader.delete(["a"]),
            reader.sweep,
        ):
            with pytest.raises(StorageError, match="read_only=True"):
                write()
        assert keys(reader) == ["a"]

    def test_a_relative_path_stays_where_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        store = LocalStore("run")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.put("a", [b"1"])
        assert (tmp_path / "run" / "a").exists()

    def test_the_folder_may_be_removed_while_the_store_is_open(self, store: LocalStore, tmp_path: Path) -> None:
        store.put("a/b", [b"1"])
        (tmp_path / "run" / "a" / "b").unlink()
        (tmp_path / "run" / "a").rmdir()
        (tmp_path / "run").rmdir()
        store.put("a/b", [b"2"])
        assert bytes(store.get("a/b")) == b"2"


class PowerLossModel:
    """Follows the calls to the system and knows what would be left if the power failed now."""

    def __init__(self, durable: Path, patch: pytest.MonkeyPatch) -> None:
        self.dirty: set[int] = set()  # inodes with bytes that only the page cache has
        self.volatile: dict[str, set[tuple[str, bool]]] = {}  # folder -> (name, exists) not yet durable
        self.linked_dirty: list[str] = []
        self.calls: list[str] = []  # that change something, repeated ones once
        self._real = {name: getattr(os, name) for name in ("open", "mkdir", "link", "unlink", "rmdir", "fsync")}
        for name in self._real:
            patch.setattr(os, name, getattr(self, name))
        for name in ("write", "writev"):
            patch.setattr(os, name, self._writer(getattr(os, name)))

    def _called(self, what: str) -> None:
        if self.calls[-1:] != [what]:
            self.calls.append(what)

    @staticmethod
    def _where(path: Any, dir_fd: int | None) -> tuple[str, str]:
        folder = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else ""
        full = os.path.join(folder, os.fspath(path))
        return os.path.dirname(full), os.path.basename(full)

    def _changed(self, path: Any, dir_fd: int | None, exists: bool) -> None:
        folder, name = self._where(path, dir_fd)
        entries = self.volatile.setdefault(folder, set())
        entries.discard((name, not exists))
        entries.add((name, exists))

    def _writer(self, real: Callable[..., int]) -> Callable[..., int]:
        def write(fd: int, data: Any) -> int:
            self._called("write")
            self.dirty.add(os.fstat(fd).st_ino)
            return real(fd, data)

        return write

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_CREAT:
            self._called("create")
            self.dirty.add(os.fstat(fd).st_ino)
            self._changed(path, dir_fd, True)
        return fd

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        self._called("mkdir")
        self._changed(path, dir_fd, True)

    def link(self, source: Any, target: Any, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool) -> None:
        self._called("link")
        self._real["link"](
            source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks
        )
        if os.stat(target, dir_fd=dst_dir_fd).st_ino in self.dirty:
            self.linked_dirty.append(os.fspath(target))
        self._changed(target, dst_dir_fd, True)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._called("unlink")
        self._real["unlink"](path, dir_fd=dir_fd)
        self._changed(path, dir_fd, False)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._real["rmdir"](path, dir_fd=dir_fd)
        self._changed(path, dir_fd, False)

    def fsync(self, fd: int) -> None:
        self._called("fsync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync file")
        self._real["fsync"](fd)
        self.dirty.discard(os.fstat(fd).st_ino)
        self.volatile.pop(os.readlink(f"/proc/self/fd/{fd}"), None)

    def survives(self, path: Path) -> bool:
        steps = [path, *path.parents]
        return path.stat().st_ino not in self.dirty and not any(
            (step.name, True) in self.volatile.get(str(step.parent), ()) for step in steps
        )

    def would_return(self, path: Path) -> bool:
        return (path.name, False) in self.volatile.get(str(path.parent), ())


@pytest.fixture
def power(tmp_path: Path) -> Iterator[PowerLossModel]:
    with pytest.MonkeyPatch.context() as patch:
        yield PowerLossModel(tmp_path, patch)


class TestPowerLoss:
    @pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
    def test_a_write_that_returned_survives_with_all_its_folders(
        self, power: PowerLossModel, tmp_path: Path, content: bytes
    ) -> None:
        store = LocalStore(tmp_path / "new" / "run")
        store.put("data/1/pack", [content])
        assert power.survives(tmp_path / "new/run/data/1/pack")
        assert store.put_if_absent("data/2/pack", [content])
        assert power.survives(tmp_path / "new/run/data/2/pack")
        for deleter in (store, LocalStore(store.url)):
            deleter.delete(["data/1/pack", "data/2/pack"])
            store.put("data/1/pack", [content])
            assert power.survives(tmp_path / "new/run/data/1/pack")

    @pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
    def test_no_object_is_visible_before_its_bytes_are_durable(
        self, power: PowerLossModel, store: LocalStore, content: bytes
    ) -> None:
        store.put("a", [content])
        store.put_if_absent("b", [content])
        assert power.linked_dirty == []

    @pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
    def test_bytes_then_name_then_folder_become_durable_and_only_then_a_write_returns(
        self, power: PowerLossModel, store: LocalStore, content: bytes
    ) -> None:
        for key, write in (("data/a", store.put), ("data/b", store.put_if_absent)):
            store.put("data/there", [b"1"])
            power.calls.clear()
            write(key, [content])
            assert power.calls == ["create", "write", "fsync file", "link", "fsync folder", "unlink"]

    def test_folders_become_durable_from_the_root_down_before_anything_is_put_into_them(
        self, power: PowerLossModel, tmp_path: Path
    ) -> None:
        LocalStore(tmp_path / "run").put("data/1/pack", [b"1"])
        made = power.calls[: power.calls.index("create")]
        assert made == ["mkdir", "fsync folder"] * 3
        assert power.survives(tmp_path / "run/data/1/pack")

    def test_folders_that_another_writer_has_just_made_become_durable_too(
        self, power: PowerLossModel, tmp_path: Path
    ) -> None:
        store = LocalStore(tmp_path / "run")
        os.mkdir(tmp_path / "run")
        os.mkdir(tmp_path / "run" / "data")
        store.put("data/pack", [b"1"])
        assert power.survives(tmp_path / "run/data/pack")

    def test_who_finds_a_key_may_rely_on_it(self, power: PowerLossModel, store: LocalStore, tmp_path: Path) -> None:
        store.put("other", [b"1"])
        for key, write in (("a", store.put), ("b", store.put_if_absent)):
            fd = os.open(tmp_path / "run" / key, os.O_CREAT | os.O_WRONLY)
            os.write(fd, b"1")  # another writer, linked and not yet synced
            os.close(fd)
            assert not power.survives(tmp_path / "run" / key)
            assert not write(key, [b"1"])
            assert power.survives(tmp_path / "run" / key)

    def test_a_deleted_object_does_not_come_back(
        self, power: PowerLossModel, store: LocalStore, tmp_path: Path
    ) -> None:
        store.put("a/1", [b"1"])
        store.put("a/2", [b"2"])
        store.delete(["a/1"])
        assert not power.would_return(tmp_path / "run/a/1")


class TestCrash:
    WRITER = """
import os, sys
from incremental_ckpt.storage import LocalStore
real = os.fsync
def fsync(fd):
    if os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).startswith(".tmp-"):
        print("written", flush=True)
        sys.stdin.readline()
    real(fd)
os.fsync = fsync
LocalStore(sys.argv[1]).put("data/attempt/pack", [b"x" * 3_000_000])
print("done", flush=True)
"""

    @pytest.fixture
    def writer(self, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-c", self.WRITER, str(tmp_path / "run")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
            yield process
            process.kill()

    def test_a_killed_writer_leaves_no_object_and_a_sweep_removes_the_rest(
        self, writer: subprocess.Popen[str], store: LocalStore, tmp_path: Path
    ) -> None:
        writer.kill()
        writer.wait()
        assert keys(store) == []
        assert len(temporaries(tmp_path)) == 1
        store.put("repo.json", [b"{}"])
        assert store.sweep() == 3_000_000
        assert temporaries(tmp_path) == []
        assert keys(store) == ["repo.json"]
        assert not (tmp_path / "run/data").exists()

    def test_a_sweep_spares_a_writer_that_is_alive(
        self, writer: subprocess.Popen[str], store: LocalStore, tmp_path: Path
    ) -> None:
        assert keys(store) == []
        assert store.sweep() == 0
        assert writer.communicate("\n", timeout=60)[0] == "done\n"
        assert keys(store) == ["data/attempt/pack"]
        assert store.get("data/attempt/pack").nbytes == 3_000_000

    def test_a_writer_whose_temporary_file_was_swept_starts_again(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, swept = os.open, []

        def sweeping_open(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            fd = real(path, flags, *rest, **options)
            if flags & os.O_CREAT and not swept:
                swept.append(path)
                store.sweep()
            return fd

        monkeypatch.setattr(os, "open", sweeping_open)
        store.put("a/b", [b"1"])
        assert swept
        assert bytes(store.get("a/b")) == b"1"

    def test_a_sweep_counts_no_bytes_that_an_object_still_uses(self, store: LocalStore, tmp_path: Path) -> None:
        store.put("a/b", [b"12345"])
        os.link(tmp_path / "run/a/b", tmp_path / "run/a/.tmp-0")  # killed between link and unlink
        assert store.sweep() == 0
        assert temporaries(tmp_path) == []
        assert bytes(store.get("a/b")) == b"12345"


class TestRefusals:
    def failing(self, code: int) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            raise OSError(code, os.strerror(code))

        return call

    @pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
    @pytest.mark.parametrize(
        ("code", "advice"),
        [
            (errno.ENOSPC, "prune"),
            (errno.EDQUOT, "quota"),
            (errno.EIO, "check the disk"),
            (errno.EROFS, "read-only"),
            (errno.EACCES, "permissions"),
        ],
    )
    def test_a_refused_write_says_what_where_why_and_leaves_nothing(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, code: int, advice: str
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", self.failing(code))
            patch.setattr(os, "writev", self.failing(code))
            with pytest.raises(StorageError, match=advice) as caught:
                store.put("data/pack", [content])
        assert "data/pack" in str(caught.value)
        assert str(tmp_path / "run") in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)
        assert not caught.value.retryable
        assert temporaries(tmp_path) == []
        assert keys(store) == []
        store.put("data/pack", [content])
        assert store.get("data/pack") == content

    @pytest.mark.parametrize(("call", "code"), [("link", errno.EPERM), ("link", errno.EMLINK), ("fsync", errno.EIO)])
    def test_a_refused_link_or_sync_is_an_error_and_leaves_no_object(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
    ) -> None:
        store.put("other", [b""])
        with monkeypatch.context() as patch:
            patch.setattr(os, call, self.failing(code))
            with pytest.raises(StorageError, match="hard links" if call == "link" else "check the disk"):
                store.put("a", [b"1"])
        assert keys(store) == ["other"]
        assert temporaries(tmp_path) == []

    def test_a_time_out_of_the_file_system_may_be_retried(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "writev", self.failing(errno.ETIMEDOUT))
        with pytest.raises(StorageError) as caught:
            store.put("a", [b"1"])
        assert caught.value.retryable

    def test_bytes_that_the_system_dropped_are_noticed_before_the_object_appears(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "writev", lambda fd, views: sum(view.nbytes for view in views))
        with pytest.raises(StorageError, match="3 bytes were written, the file has 0"):
            store.put("a", [b"123"])
        assert keys(store) == []

    def test_a_read_that_fails_is_a_storage_error(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put("a", [b"123"])
        monkeypatch.setattr(os, "preadv", self.failing(errno.EIO))
        with pytest.raises(StorageError, match="cannot read a from"):
            store.get("a")

    def test_a_listing_that_fails_is_an_error_and_not_an_empty_store(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put("a", [b"123"])
        monkeypatch.setattr(os, "scandir", self.failing(errno.EIO))
        with pytest.raises(StorageError, match="cannot list"):
            keys(store)

    def test_an_object_where_a_folder_is_needed_is_an_error(self, store: LocalStore) -> None:
        store.put("a", [b"1"])
        with pytest.raises(StorageError, match="a file stands where a folder is needed"):
            store.put("a/b", [b"2"])
        store.put("c/d", [b"1"])
        with pytest.raises(StorageError, match="a folder stands where an object is needed"):
            store.put("c", [b"2"])


class TestSystemCalls:
    def test_short_buffered_writes_are_continued(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "writev", lambda fd, views: os.write(fd, b"".join(views)[:7]))
        parts = [b"abc", b"defghijkl", b"m", b"nopqrstu" * 5]
        store.put("a", parts)
        assert bytes(store.get("a")) == b"".join(parts)

    @pytest.mark.parametrize("count", [4096 * 3, 5000, 300])
    def test_short_direct_writes_are_continued(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, count: int
    ) -> None:
        content, real = LARGE[: (1 << 20) + 5], os.write
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:count]))
        store.put("a", [content])
        assert store.get("a") == content

    @pytest.mark.parametrize("refused", [1, 2])
    def test_a_file_system_that_refuses_direct_writes_gets_buffered_ones(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, refused: int
    ) -> None:
        real, calls = os.write, []

        def refusing_write(fd: int, data: memoryview) -> int:
            calls.append(directio.fcntl.fcntl(fd, directio.fcntl.F_GETFL) & os.O_DIRECT)
            if calls[-1] and len(calls) >= refused:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, data)

        monkeypatch.setattr(os, "write", refusing_write)
        store.put("a", [LARGE])
        assert store.get("a") == LARGE
        assert calls[-1] == 0

    def test_a_file_system_without_direct_writes_gets_buffered_ones(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = directio.fcntl.fcntl

        def refusing_fcntl(fd: int, command: int, flags: int = 0) -> int:
            if command == directio.fcntl.F_SETFL:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, command, flags)

        monkeypatch.setattr(directio.fcntl, "fcntl", refusing_fcntl)
        store.put("a", [LARGE])
        assert store.get("a") == LARGE

    def test_bounce_buffers_are_reused(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        made, real = [], directio.mmap.mmap
        monkeypatch.setattr(directio, "_BOUNCE", directio._BouncePool())
        monkeypatch.setattr(directio.mmap, "mmap", lambda *size: made.append(size) or real(*size))
        for number in range(5):
            store.put(f"a/{number}", [LARGE])
        assert len(made) == 1

    def test_short_reads_are_continued(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        store.put("a", [b"0123456789"])
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:3]], at))
        assert bytes(store.get("a", 1, 9)) == b"12345678"

    def test_an_object_that_shrinks_while_it_is_read_is_corrupt(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put("a", [b"0123456789"])
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:3]], at) if at < 3 else 0)
        with pytest.raises(CorruptionError, match="truncated") as caught:
            store.get("a", 0, 5)
        assert caught.value.key == "a"

    def test_our_own_link_whose_answer_was_lost_is_ours(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.link

        def repeated_link(*names: Any, **options: Any) -> None:
            real(*names, **options)
            raise FileExistsError(errno.EEXIST, "File exists")

        monkeypatch.setattr(os, "link", repeated_link)
        assert store.put_if_absent("a", [b"1"]) is True

    def test_a_key_that_appears_while_we_write_is_not_overwritten(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rival, real = LocalStore(store.url), os.link

        def overtaken_link(*names: Any, **options: Any) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(os, "link", real)
                rival.put(names[1], [b"rival"])
            real(*names, **options)

        monkeypatch.setattr(os, "link", overtaken_link)
        assert store.put_if_absent("a", [b"ours!"]) is False
        with pytest.raises(ConflictError):
            store.put("b", [b"ours!"])
        assert bytes(store.get("a")) == bytes(store.get("b")) == b"rival"

    def test_no_descriptor_is_left_open(self, store: LocalStore, tmp_path: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        store.put("a/b/c", [LARGE])
        store.put("a/b/c", [LARGE])
        store.get("a/b/c", 3, 5)
        keys(store)
        next(store.list())  # dropped half-way
        for refused in (lambda: store.put("a/b", [b""]), lambda: store.get("q/r"), lambda: store.put("a/b/c/d", [b""])):
            with pytest.raises((StorageError, NotFoundError)):
                refused()
        store.sweep()
        store.delete(["a/b/c", "q/r"])
        assert len(os.listdir("/proc/self/fd")) == before


class TestFolders:
    def test_emptied_folders_are_removed_and_others_are_not(self, store: LocalStore, tmp_path: Path) -> None:
        for key in ("data/1/pack", "data/2/pack", "manifests/1"):
            store.put(key, [b"x"])
        store.delete(["data/1/pack"])
        assert sorted(os.listdir(tmp_path / "run" / "data")) == ["2"]
        store.delete(["data/2/pack", "manifests/1"])
        assert os.listdir(tmp_path / "run") == []

    def test_a_folder_that_a_delete_takes_from_under_a_writer_is_made_again(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put("data/1/old", [b"x"])
        real, deleted = local.sync_existing, []

        def overtaken(folder: int, name: str) -> bool:
            if name == "new" and not deleted:
                deleted.append(name)
                LocalStore(store.url).delete(["data/1/old"])
            return real(folder, name)

        monkeypatch.setattr(local, "sync_existing", overtaken)
        store.put("data/1/new", [b"y"])
        assert deleted
        assert keys(store) == ["data/1/new"]

    def test_a_folder_that_something_removes_for_ever_is_an_error(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def vanished(folder: int, name: str) -> int:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

        monkeypatch.setattr(local, "create_temporary", vanished)
        with pytest.raises(StorageError, match="vanished") as caught:
            store.put("a/b", [b"1"])
        assert caught.value.retryable

    def test_a_listing_shows_foreign_files_and_hides_dots(self, store: LocalStore, tmp_path: Path) -> None:
        store.put("data/pack", [b"123"])
        root = tmp_path / "run"
        (root / "Read me, please.txt").write_bytes(b"1")
        (root / ".hidden").write_bytes(b"1")
        (root / ".git").mkdir()
        (root / ".git" / "HEAD").write_bytes(b"1")
        (root / "data" / ".tmp-0123").write_bytes(b"1")
        (root / "empty").mkdir()
        assert keys(store) == ["Read me, please.txt", "data/pack"]
        assert keys(store, ".") == keys(store, ".git/") == keys(store, "data/.tmp-") == []

    def test_a_listing_reads_only_folders_that_the_prefix_can_lead_to(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for key in ("data/1/pack", "data/2/pack", "data/20/pack", "manifests/1"):
            store.put(key, [b"x"])
        real, scanned = os.scandir, []

        def scandir(fd: int) -> Any:
            scanned.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path / "run"))
            return real(fd)

        monkeypatch.setattr(os, "scandir", scandir)
        assert keys(store, "data/2") == ["data/2/pack", "data/20/pack"]
        assert scanned == ["data", "data/2", "data/20"]
        scanned.clear()
        assert [one.key for one in store.list("data/", after="data/2/pack")] == ["data/20/pack"]
        assert scanned == ["data", "data/2", "data/20"]

    def test_what_vanishes_while_listing_is_left_out(self, store: LocalStore) -> None:
        for key in ("a/1", "a/2", "a/3", "b/1", "c/1"):
            store.put(key, [b"x"])
        listing = store.list()
        assert next(listing).key == "a/1"
        store.delete(["a/2", "b/1"])
        assert [one.key for one in listing] == ["a/3", "c/1"]

    @pytest.mark.parametrize(("name", "skipped"), [("lost+found", True), ("data", False)])
    def test_a_folder_that_may_not_be_read_is_skipped_only_if_no_key_leads_through_it(
        self, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, skipped: bool
    ) -> None:
        store.put("a", [b"x"])
        (tmp_path / "run" / name).mkdir()
        real = os.open

        def guarded_open(path: Any, *rest: Any, **options: Any) -> int:
            if path == name:
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(path, *rest, **options)

        monkeypatch.setattr(os, "open", guarded_open)
        if skipped:
            assert keys(store) == ["a"]
        else:
            with pytest.raises(StorageError, match="permissions"):
                keys(store)


class TestHostileFolders:
    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "secret").write_bytes(b"secret")
        return outside

    def test_the_folder_itself_may_be_a_link(self, outside: Path, tmp_path: Path) -> None:
        (tmp_path / "run").symlink_to(outside)
        store = LocalStore(tmp_path / "run")
        store.put("a/b", [b"1"])
        assert keys(store) == ["a/b", "secret"]
        assert (outside / "a/b").read_bytes() == b"1"

    def test_no_link_to_a_folder_is_followed(self, store: LocalStore, outside: Path, tmp_path: Path) -> None:
        store.put("a", [b"1"])
        (tmp_path / "run" / "data").symlink_to(outside)
        for operation in (
            lambda: store.get("data/secret"),
            lambda: store.put("data/new", [b"1"]),
            lambda: store.put_if_absent("data/secret", [b"1"]),
            lambda: store.delete(["data/secret"]),
            lambda: keys(store, "data/"),
        ):
            with pytest.raises(StorageError, match="symbolic links inside a store are never followed"):
                operation()
        assert keys(store) == ["a", "data"]
        store.sweep()
        assert [path.name for path in outside.iterdir()] == ["secret"]

    def test_no_link_to_a_file_is_followed(self, store: LocalStore, outside: Path, tmp_path: Path) -> None:
        store.put("data/a", [b"1"])
        (tmp_path / "run/data/link").symlink_to(outside / "secret")
        (tmp_path / "run/data/new").symlink_to(outside / "new")
        for key in ("data/link", "data/new"):
            for operation in (
                lambda key=key: store.get(key),
                lambda key=key: store.put(key, [b"secret"]),
                lambda key=key: store.put_if_absent(key, [b"1"]),
            ):
                with pytest.raises(StorageError, match="symbolic links inside a store are never followed"):
                    operation()
        store.delete(["data/link", "data/new"])
        assert keys(store) == ["data/a"]
        assert [path.name for path in outside.iterdir()] == ["secret"]

    def test_a_pipe_does_not_hang_a_reader(self, store: LocalStore, tmp_path: Path) -> None:
        store.put("a", [b"1"])
        os.mkfifo(tmp_path / "run" / "pipe")
        with pytest.raises(StorageError, match="not a regular file"):
            store.get("pipe")
        os.mkfifo(tmp_path / "run" / ".tmp-pipe")
        with pytest.raises(StorageError, match="not a regular file"):
            store.sweep()

    def test_a_huge_range_is_refused_before_memory_is_allocated(self, store: LocalStore) -> None:
        store.put("a", [b"1"])
        with pytest.raises(CorruptionError):
            store.get("a", 0, 1 << 62)


def test_a_folder_of_the_store_that_cannot_be_written_is_refused_when_the_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where somebody else has copied it there: else the first save would be the one to find out."""
    with contextlib.closing(LocalStore(tmp_path)) as store:
        store.put("data/x", [b"x"])
        store.put("manifests/y", [b"y"])
    (tmp_path / ".snapshot").mkdir()
    (tmp_path / "lost+found").mkdir()
    locked = {tmp_path / "data", tmp_path / ".snapshot", tmp_path / "lost+found"}
    monkeypatch.setattr("incremental_ckpt.storage.local.os.access", lambda path, mode: path not in locked)
    with pytest.raises(StorageError, match=f"cannot write to {tmp_path}: {tmp_path / 'data'} is not writable by this"):
        LocalStore(tmp_path)
    assert LocalStore(tmp_path, read_only=True).get("data/x") == b"x"
    locked.discard(tmp_path / "data")
    LocalStore(tmp_path)


def test_a_folder_that_a_delete_takes_while_the_store_is_opened_is_no_reason_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "resumes").mkdir()
    real = os.access

    def taken_first(path: Path, mode: int) -> bool:
        if path.name == "resumes":
            path.rmdir()
        return real(path, mode)

    monkeypatch.setattr("incremental_ckpt.storage.local.os.access", taken_first)
    LocalStore(tmp_path)
