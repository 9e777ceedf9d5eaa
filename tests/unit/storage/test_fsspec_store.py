"""What a store on an fsspec file system does beyond the conformance tests: who may create, faults, bad input."""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, known_implementations
from fsspec.spec import AbstractBufferedFile

from incremental_ckpt.errors import ConflictError, NotFoundError, StorageError
from incremental_ckpt.storage import open_store
from incremental_ckpt.storage.fsspec import FsspecStore, WeakerStoreWarning
from incremental_ckpt.storage.retry import Retry, RetryStore

LARGE = bytes(range(251)) * ((5 << 20) // 251)


class UploadingFile(AbstractBufferedFile):
    """An object that appears when the file is closed, as the cloud's file systems write them."""

    def _initiate_upload(self) -> None:
        self.sent: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.sent.append(self.buffer.getvalue())
        self.fs.broken_parts -= 1
        if self.fs.broken_parts == 0:
            raise ConnectionResetError("the part did not arrive")
        if final:
            self.fs.keep(self.path, b"".join(self.sent), exclusive="x" in self.mode)
        return True

    def discard(self) -> None:
        self.fs.discarded.append(self.path)


class ObjectFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system over an object store that keeps its promise about mode ``xb``."""

    protocol = "oss"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    modes: ClassVar[set[str]] = {"wb", "xb"}
    excludes: ClassVar[bool] = True
    broken_parts = -1
    keeps = 1 << 62

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix("oss://")))

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.discarded: list[str] = []
        self.opened: list[str] = []
        self._lock = threading.Lock()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.opened.append(mode)
        if mode == "rb":
            return super()._open(path, mode, **options)
        if mode not in self.modes:
            raise NotImplementedError("File mode not supported")
        return UploadingFile(self, path, mode)

    def keep(self, path: str, value: bytes, exclusive: bool) -> None:
        with self._lock:
            if exclusive and self.excludes and self.exists(path):
                raise FileExistsError(path)
            self.pipe_file_into(path, value[: self.keeps])

    def pipe_file_into(self, path: str, value: bytes) -> None:
        MemoryFileSystem._open(self, path, "wb", data=value)


@pytest.fixture
def fs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectFileSystem]:
    monkeypatch.setitem(_registry, "oss", ObjectFileSystem)
    ObjectFileSystem.clear_instance_cache()
    monkeypatch.setattr(ObjectFileSystem, "store", {})
    monkeypatch.setattr(ObjectFileSystem, "pseudo_dirs", ["", "/bucket"])
    yield fsspec.filesystem("oss")
    ObjectFileSystem.clear_instance_cache()


class TestObjectStores:
    def test_objects_are_created_exclusively(self, fs: ObjectFileSystem) -> None:
        store = FsspecStore("oss://bucket/run")
        assert store.put_if_absent("a", [b"1"]) is True
        assert store.put_if_absent("a", [b"2"]) is False
        store.put("b", [LARGE])
        with pytest.raises(ConflictError):
            store.put("b", [LARGE[:-1], b"x"])
        assert store.get("b") == LARGE
        # The probe at construction, and then exclusively only.
        assert fs.opened.count("wb") == 1

    def test_whether_it_excludes_is_tried_once(self, fs: ObjectFileSystem) -> None:
        store = FsspecStore("oss://bucket/run")
        for key in "abc":
            assert store.put_if_absent(key, [b"1"]) is True
        assert fs.opened.count("xb") == 4

    @pytest.mark.parametrize("attribute", [("excludes", False), ("modes", {"wb"})], ids=["ignored", "refused"])
    def test_a_file_system_that_does_not_exclude_is_used_with_one_warning(
        self, fs: ObjectFileSystem, monkeypatch: pytest.MonkeyPatch, attribute: tuple[str, Any]
    ) -> None:
        monkeypatch.setattr(ObjectFileSystem, *attribute)
        store = FsspecStore("oss://bucket/run")
        fs.pipe_file_into("/bucket/run/taken", b"theirs")
        assert store.put_if_absent("taken", [b"ours"]) is False
        with pytest.warns(WeakerStoreWarning, match=r"oss://bucket/run.*Two jobs") as warned:
            assert store.put_if_absent("a", [b"1"]) is True
        assert len(warned) == 1
        assert store.put_if_absent("b", [LARGE]) is True
        assert store.put_if_absent("b", [b"2"]) is False
        with pytest.raises(ConflictError):
            store.put("a", [b"2"])
        assert bytes(store.get("taken")) == b"theirs"

    def test_a_broken_upload_leaves_no_object_and_may_be_repeated(self, fs: ObjectFileSystem) -> None:
        store = FsspecStore("oss://bucket/run")
        fs.broken_parts = 1
        with pytest.raises(StorageError, match=r"write a to oss://bucket/run.*did not arrive") as caught:
            store.put("a", [LARGE, LARGE])
        assert caught.value.retryable
        assert fs.discarded == ["/bucket/run/a"]
        assert list(store.list()) == []
        fs.broken_parts = 1
        RetryStore(store, Retry(first=0.0)).put("a", [LARGE, LARGE])
        assert store.get("a", len(LARGE)) == LARGE

    def test_an_object_that_arrived_cut_short_is_removed(
        self, fs: ObjectFileSystem, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = FsspecStore("oss://bucket/run")
        monkeypatch.setattr(fs, "keeps", 3)
        with pytest.raises(StorageError, match="5 bytes were written, the file has 3") as caught:
            store.put("a", [b"12345"])
        assert caught.value.retryable
        assert list(store.list()) == []

    def test_a_bucket_that_does_not_exist_is_refused(self, fs: ObjectFileSystem) -> None:
        with pytest.raises(StorageError, match="no bucket other"):
            FsspecStore("oss://other/run")


class TestFolders:
    def test_there_is_one_warning_and_none_for_a_reader(self, tmp_path: Path) -> None:
        with pytest.warns(WeakerStoreWarning, match="Two jobs") as warned:
            store = FsspecStore(f"file://{tmp_path}/run")
            store.put("a/b", [b"1"])
            store.put_if_absent("a/c", [b"1"])
        assert len(warned) == 1
        reader = FsspecStore(f"file://{tmp_path}/run", read_only=True)
        assert bytes(reader.get("a/b")) == b"1"
        with pytest.raises(StorageError, match="read_only"):
            reader.put("x", [b""])
        with pytest.raises(StorageError, match="read_only"):
            reader.delete(["a/b"])

    @pytest.mark.filterwarnings("ignore::incremental_ckpt.storage.fsspec.WeakerStoreWarning")
    def test_an_object_never_appears_half_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = FsspecStore(f"file://{tmp_path}/run")
        real, seen = store._fs.mv, []

        def mv(source: str, target: str) -> None:
            seen.append((os.path.getsize(source), os.path.exists(target), [one.key for one in store.list()]))
            real(source, target)

        monkeypatch.setattr(store._fs, "mv", mv)
        store.put("a/b", [LARGE, b"1"])
        assert seen == [(len(LARGE) + 1, False, [])]

    @pytest.mark.filterwarnings("ignore::incremental_ckpt.storage.fsspec.WeakerStoreWarning")
    def test_a_write_that_fails_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = FsspecStore(f"file://{tmp_path}/run")

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(store._fs, "mv", full)
            with pytest.raises(StorageError, match=r"write a/b to .*No space left") as caught:
                store.put("a/b", [b"1"])
        assert not caught.value.retryable
        assert [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()] == []


class TestFaults:
    @pytest.mark.parametrize(
        ("error", "retryable"),
        [
            (TimeoutError("too late"), True),
            (ConnectionResetError("gone"), True),
            (PermissionError(errno.EACCES, "no"), False),
            (RuntimeError("what is this"), False),
        ],
    )
    def test_what_is_worth_a_retry_is_known_here(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, retryable: bool
    ) -> None:
        store = FsspecStore(f"memory://{secrets.token_hex(8)}")
        store.put("a", [b"1"])

        def broken(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(store._fs, "cat_file", broken, raising=False)
        with pytest.raises(StorageError, match="read a from") as caught:
            store.get("a")
        assert caught.value.retryable is retryable

    @pytest.mark.parametrize(("status", "retryable"), [(503, True), (429, True), (403, False)])
    def test_the_status_of_an_http_answer_decides(
        self, monkeypatch: pytest.MonkeyPatch, status: int, retryable: bool
    ) -> None:
        class AnswerError(Exception):
            code = status

        store = FsspecStore(f"memory://{secrets.token_hex(8)}")

        def broken(*_: object, **__: object) -> None:
            raise AnswerError

        monkeypatch.setattr(store._fs, "info", broken, raising=False)
        with pytest.raises(StorageError) as caught:
            store.get("a")
        assert caught.value.retryable is retryable

    def test_a_listing_that_fails_is_an_error_and_not_an_empty_store(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = FsspecStore(f"memory://{secrets.token_hex(8)}")

        def broken(*_: object, **__: object) -> None:
            raise PermissionError("no")

        monkeypatch.setattr(store._fs, "find", broken, raising=False)
        with pytest.raises(StorageError, match="cannot list"):
            list(store.list())


class TestOpening:
    def test_other_schemes_are_fsspecs_and_are_repeated(self, fs: ObjectFileSystem) -> None:
        store = open_store("oss://bucket/run")
        assert isinstance(store, RetryStore)
        store.put("a", [b"1"])
        assert store.url == "oss://bucket/run"

    def test_fsspecs_own_kinds_have_a_prefix_and_open_by_their_url(self) -> None:
        name = secrets.token_hex(8)
        store = open_store(f"fsspec+memory://{name}")
        store.put("a", [b"1"])
        assert bytes(open_store(store.url).get("a")) == b"1"
        with pytest.raises(NotFoundError):
            open_store(f"memory://{name}").get("a")

    def test_a_package_that_is_missing_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        missing = {"class": "no_such_package.FileSystem", "err": "Install no_such_package for the sky"}
        monkeypatch.setitem(known_implementations, "sky", missing)
        with pytest.raises(StorageError, match=r"sky://a.*Install no_such_package"):
            open_store("sky://a/b")

    def test_a_place_that_cannot_be_written_is_refused(self) -> None:
        with pytest.raises(StorageError, match=r"cannot write to fsspec\+file:///proc/run") as caught:
            open_store("fsspec+file:///proc/run")
        assert not caught.value.retryable
        assert "\n" not in str(caught.value)
