"""A store on a file system that fsspec reaches, as far as that file system can keep a store's promises.

It must not know what the bytes mean, and repeats nothing.
"""

from __future__ import annotations

import os
import secrets
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from incremental_ckpt.errors import CheckpointError, ConflictError, NotFoundError, StorageError
from incremental_ckpt.storage.access import Access
from incremental_ckpt.storage.arguments import byte_views, check_range, new_or_given, range_end, short_object
from incremental_ckpt.storage.base import Buffer, StoredObject
from incremental_ckpt.storage.slices import Concatenation

_CHUNK = 4 << 20
_TEMPORARY = ".tmp-"
_RETRYABLE_STATUS = {408, 429, 500, 502, 503, 504}

_AT_CLOSE = {"abfs", "abfss", "az", "gcs", "gs", "oci", "oss", "r2", "s3", "s3a", "tos"}
"""File systems over object stores: an object appears, whole, when the file is closed; there are no folders."""

_OURS = {"file", "local", "memory", "s3"}
"""Schemes that open_store takes for stores of its own; fsspec's are ``fsspec+SCHEME``."""

# Where a file system cannot create exclusively, at least the writers of one object in this process wait for each other.
_TURNS = [threading.Lock() for _ in range(64)]
_LONGEST_REASON = 300


class UnknownSchemeError(StorageError):
    """fsspec knows no file system of this name."""


class WeakerStoreWarning(UserWarning):
    """The file system cannot exclude that two writers create one object at the same time."""


class FsspecStore:
    """The objects are the files below a folder, or the objects below a prefix, of an fsspec file system.

    Over object stores ``put_if_absent`` creates exclusively (mode ``xb``) if the file system really does, which the
    first write finds out. Elsewhere objects are written under a hidden name and renamed, after asking whether the key
    exists: two jobs at the same time may then both think that they created it. One WeakerStoreWarning says so.
    """

    def __init__(self, url: str, *, read_only: bool = False, **options: Any) -> None:
        """
        Args:
            url: as fsspec takes it.
            options: for the file system, as fsspec takes them; most are better left to the environment.

        Raises:
            UnknownSchemeError: no such file system.
            StorageError: its package is missing, or the place cannot be read, or (unless ``read_only``) not written.
        """
        scheme = url.partition(":")[0]
        self._url = f"fsspec+{url}" if scheme in _OURS else url
        self._access = Access(self._url, read_only)
        with self._reporting("open"):
            self._fs, root = _file_system(url, options)
        self._root = root.rstrip("/") + "/"
        protocol = self._fs.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else {*protocol}
        self._in_memory = "memory" in self._protocols
        self._on_disk = "file" in self._protocols
        self._at_close = bool(self._protocols & _AT_CLOSE)
        # Whether mode "xb" excludes other writers: None until the first write has found out.
        self._exclusive: bool | None = None
        self._check_place()
        if not (read_only or self._at_close or self._in_memory):
            self._warn()

    @property
    def url(self) -> str:
        return self._url

    @property
    def read_only(self) -> bool:
        return self._access.read_only

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._access.check_writable("write", key)
        content = Concatenation(byte_views(parts))
        with self._reporting(f"write {key} to"):
            if not self._create(key, content) and not self._holds(key, content):
                raise ConflictError(
                    f"cannot write {key} to {self._url}: it exists with other bytes, and objects are never "
                    "overwritten. Another job writes to this store: stop one of them"
                )

    def put_if_absent(self, key: str, parts: Sequence[Buffer]) -> bool:
        self._access.check_writable("write", key)
        content = Concatenation(byte_views(parts))
        with self._reporting(f"write {key} to"):
            return self._create(key, content)

    def get(self, key: str, start: int = 0, end: int | None = None, into: memoryview | None = None) -> memoryview:
        self._access.check_key(key)
        check_range(key, start, end)
        with self._reporting(f"read {key} from"):
            size = self._size(key)
        if size is None:
            raise NotFoundError(f"no object {key} in {self._url}", key=key)
        last = range_end(key, size, start, end)
        target = new_or_given(key, last - start, into)
        with self._reporting(f"read {key} from"):
            for at in range(start, last, _CHUNK):
                wanted = min(_CHUNK, last - at)
                found = self._fs.cat_file(self._root + key, start=at, end=at + wanted)
                if len(found) != wanted:
                    raise short_object(key, last, at + len(found))
                target[at - start : at - start + wanted] = found
        return target

    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredObject]:
        self._access.check_open()
        return self._list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        self._access.check_open()
        for key in keys:
            self._access.check_writable("delete", key)
            with self._reporting(f"delete {key} in"):
                self._refuse_links(key.rpartition("/")[0])
                self._remove(self._root + key)

    def close(self) -> None:
        self._access.closed = True

    # Writing.

    def _create(self, key: str, content: Concatenation) -> bool:
        """False if the key exists."""
        if self._in_memory:
            return self._create_in_memory(key, content)
        if not self._at_close:
            return self._create_by_renaming(key, content)
        if self._exclusive is None:
            return self._create_and_learn(key, content)
        if self._exclusive:
            return self._create_exclusively(key, content)
        with self._turn(key):
            if self._size(key) is not None:
                return False
            self._write(self._root + key, "wb", content)
        return True

    def _create_in_memory(self, key: str, content: Concatenation) -> bool:
        with self._turn(key):
            if self._size(key) is not None:
                return False
            # Not open and write: it shows files from the moment they are opened.
            self._fs.pipe_file(self._root + key, b"".join(content.between(0, content.size)))
        return True

    def _create_by_renaming(self, key: str, content: Concatenation) -> bool:
        if self._size(key) is not None:
            return False  # asked first, so that many bytes are not sent in vain
        folder = (self._root + key).rpartition("/")[0]
        temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}"
        self._fs.makedirs(folder, exist_ok=True)
        try:
            self._write(temporary, "wb", content)
            with self._turn(key):
                if self._size(key) is not None:
                    return False
                self._fs.mv(temporary, self._root + key)
        finally:
            with suppress(Exception):  # a hidden name is left
                self._remove(temporary)
        return True

    def _create_exclusively(self, key: str, content: Concatenation) -> bool:
        if content.size > _CHUNK and self._size(key) is not None:
            return False
        try:
            self._write(self._root + key, "xb", content)
        except FileExistsError:
            return False
        return True

    def _create_and_learn(self, key: str, content: Concatenation) -> bool:
        """Writes twice: a file system that takes the same bytes again does not create exclusively."""
        if self._size(key) is not None:
            return False
        try:
            created = self._create_exclusively(key, content)
            if not created or content.size > _CHUNK:
                return created  # a small object will tell
            self._write(self._root + key, "xb", content)
        except FileExistsError:
            self._exclusive = True
            return True
        except (NotImplementedError, ValueError):  # no such mode
            self._exclusive = False
            self._warn()
            return self._create(key, content)
        self._exclusive = False
        self._warn()
        return True

    def _write(self, path: str, mode: str, content: Concatenation) -> None:
        file = self._fs.open(path, mode)
        try:
            for start in range(0, content.size, _CHUNK):
                for view in content.between(start, min(start + _CHUNK, content.size)):
                    file.write(view)
            file.close()
        except BaseException:
            if self._at_close:
                # Closing it, now or when it is collected, would make an object of what was written so far.
                with suppress(Exception):
                    file.discard()
                with suppress(AttributeError):
                    file.closed = True
            else:
                with suppress(Exception):  # else the bytes of a hidden file stay taken for as long as the error lives
                    file.close()
            raise
        found = self._fs.info(path)["size"]
        if found != content.size:
            with suppress(Exception):
                self._remove(path)
            raise StorageError(
                f"cannot write {path}: {content.size} bytes were written, the file has {found}", retryable=True
            )

    def _holds(self, key: str, content: Concatenation) -> bool:
        """Whether the object's bytes are the content."""
        if self._size(key) != content.size:
            return False
        for start in range(0, content.size, _CHUNK):
            end = min(start + _CHUNK, content.size)
            if self._fs.cat_file(self._root + key, start=start, end=end) != b"".join(content.between(start, end)):
                return False
        return True

    def _turn(self, key: str) -> threading.Lock:
        return _TURNS[hash(self._root + key) % len(_TURNS)]

    def _warn(self) -> None:
        warnings.warn(
            f"{self._url}: this file system cannot create a file only if it is absent. Two jobs that write to it at "
            "the same time may overwrite each other's checkpoints: make sure that there is one. See docs/stores.md",
            WeakerStoreWarning,
            stacklevel=3,
        )

    # Reading, listing and removing.

    def _size(self, key: str) -> int | None:
        """Bytes of the object; None if there is none."""
        path = self._root + key
        self._refuse_links(key)
        self._fs.invalidate_cache()
        try:
            found = self._fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def _list(self, prefix: str, after: str) -> Iterator[StoredObject]:
        *folders, _ = prefix.split("/")
        if any(not name or name.startswith(".") for name in folders):
            return
        with self._reporting(f"list {prefix!r} in"):
            self._fs.invalidate_cache()
            folder = "".join(f"{name}/" for name in folders)
            self._refuse_links(folder.rstrip("/"))
            try:
                sizes = self._sizes_below(self._root + folder)
            except (FileNotFoundError, NotADirectoryError):
                sizes = {}
        for key in sorted(sizes):
            if key > after and key.startswith(prefix) and not any(name.startswith(".") for name in key.split("/")):
                yield StoredObject(key, int(sizes[key]))

    def _sizes_below(self, folder: str) -> dict[str, int]:
        """Bytes by key. On a disk no link is followed: fsspec would, out of the root and round in circles."""
        if self._on_disk:
            paths = (f"{parent}/{name}" for parent, _, names in os.walk(folder.rstrip("/")) for name in names)
            return {path.removeprefix(self._root): os.lstat(path).st_size for path in paths}
        found = self._fs.find(folder, detail=True)
        return {path.removeprefix(self._root): facts["size"] for path, facts in found.items()}

    def _refuse_links(self, key: str) -> None:
        """Raises StorageError if a link stands below the root of a disk: it could lead anywhere."""
        if not self._on_disk:
            return
        path = Path(self._root)
        for name in key.split("/"):
            path /= name
            if path.is_symlink():
                raise StorageError(
                    f"cannot use {key} in {self._url}: {path} is a link, and links inside a store are never followed: "
                    "put the file itself there"
                )

    def _remove(self, path: str) -> None:
        try:
            self._fs.rm_file(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            pass
        except PermissionError:
            if not self._fs.isdir(path):
                raise

    # What a caller did wrong, and what the file system refuses.

    def _check_place(self) -> None:
        bucket = self._root.lstrip("/").partition("/")[0]
        with self._reporting("use"):
            try:
                self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                if self._at_close and not self._fs.exists(bucket):
                    raise StorageError(f"cannot use {self._url}: there is no bucket {bucket}") from None
        if self.read_only or self._in_memory:
            return
        probe = f"{self._root}{_TEMPORARY}{secrets.token_hex(8)}"
        with self._reporting("write to"):
            if not self._at_close:
                self._fs.makedirs(self._root, exist_ok=True)
            self._write(probe, "wb", Concatenation([]))
            self._remove(probe)

    @contextmanager
    def _reporting(self, action: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # each file system has its own
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]
            raise StorageError(f"cannot {action} {self._url}: {reason}", retryable=_is_retryable(error)) from error


def _file_system(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    scheme = url.partition(":")[0]
    if scheme not in fsspec.available_protocols():
        raise UnknownSchemeError(f"fsspec knows no file system {scheme!r}")
    try:
        return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]
    except ImportError as error:
        raise StorageError(f"cannot open {url!r}: {error or 'a package is missing'}") from error


def _is_retryable(error: Exception) -> bool:
    status = next((getattr(error, name) for name in ("status", "status_code", "code") if hasattr(error, name)), None)
    return isinstance(error, (TimeoutError, ConnectionError)) or status in _RETRYABLE_STATUS
