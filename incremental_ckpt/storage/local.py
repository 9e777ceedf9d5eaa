"""A store in a folder: durable when a write returns, also through a power loss, and never overwriting (I2).

It must not know what the bytes mean, and keeps nothing about an object beside the object.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path

from incremental_ckpt.arguments import path as path_of
from incremental_ckpt.errors import ConflictError, NotFoundError, StorageError
from incremental_ckpt.storage.access import Access
from incremental_ckpt.storage.arguments import byte_views, is_segment, new_or_given, range_end, short_object, split_key
from incremental_ckpt.storage.base import Buffer, StoredObject
from incremental_ckpt.storage.directio import write_parts
from incremental_ckpt.storage.folders import (
    TEMPORARY,
    create_temporary,
    entries,
    link,
    open_file,
    open_root,
    remove_dead_temporaries,
    step_into,
    sync_existing,
    unlink_file,
    walk,
)

_TRIES = 16
_COMPARE_BYTES = 1 << 20

_ADVICE = {
    errno.ENOSPC: "the disk is full: free space or prune old checkpoints",
    errno.EDQUOT: "the disk quota is used up: free space or prune old checkpoints",
    errno.EFBIG: "the file system or a limit does not allow files of this size: use smaller packs or raise the limit",
    errno.EACCES: "check the owner and the permissions of the folder",
    errno.EPERM: "the file system or its permissions do not allow it; it must support hard links",
    errno.EMLINK: "the file system must support hard links",
    errno.EOPNOTSUPP: "the file system must support hard links",
    errno.EROFS: "the file system is mounted read-only: choose another place",
    errno.ELOOP: "symbolic links inside a store are never followed: put the file itself there",
    errno.ENOTDIR: "a file stands where a folder is needed: remove it or choose another place",
    errno.EISDIR: "a folder stands where an object is needed: remove it or choose another place",
    errno.EIO: "the device reports errors: check the disk",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOENT: "it vanished while it was being used: does something else clean this folder?",
}
_RETRYABLE = {errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.ENOENT, errno.EINTR}


class LocalStore:
    """The objects are the files below a folder, their keys the paths relative to it.

    The folder itself may be a symbolic link; below it none is followed. Names with a leading dot are not objects.
    The folder is made by the first write.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        """
        Raises:
            StorageError: the path is not a folder, or (unless ``read_only``) could not be written.
            TypeError, ValueError: it is no path.
        """
        self._root = path_of("path", path).absolute()
        self._access = Access(str(self._root), read_only)
        # Folders whose entry in their parent is durable, as key prefixes; "" is the root.
        self._durable: set[str] = set()
        self._unmade = self._check_place()

    @property
    def url(self) -> str:
        return str(self._root)

    @property
    def read_only(self) -> bool:
        return self._access.read_only

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        views = byte_views(parts)
        with self._writing(key):
            if not self._create(key, views) and not self._holds(key, views):
                raise ConflictError(
                    f"cannot write {key} to {self._root}: it exists with other bytes, and objects are never "
                    "overwritten. Another job writes to this store: stop one of them"
                )

    def put_if_absent(self, key: str, parts: Sequence[Buffer]) -> bool:
        views = byte_views(parts)
        with self._writing(key):
            return self._create(key, views)

    def get(self, key: str, start: int = 0, end: int | None = None, into: memoryview | None = None) -> memoryview:
        self._access.check_open()
        folders, name = split_key(key)
        with self._reporting(f"read {key} from"):
            try:
                fd = self._open_object(folders, name)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise NotFoundError(f"no object {key} in {self._root}", key=key) from None
            try:
                length = range_end(key, os.fstat(fd).st_size, start, end) - start
                target = new_or_given(key, length, into)
                done = 0
                while done < length:
                    count = os.preadv(fd, [target[done:]], start + done)
                    if not count:
                        raise short_object(key, start + length, start + done)
                    done += count
                return target
            finally:
                os.close(fd)

    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredObject]:
        self._access.check_open()
        return self._list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects durably, and the folders that become empty."""
        for folders, group in groupby(map(split_key, keys), key=lambda one: one[0]):
            names = [name for _, name in group]
            with self._writing("/".join([*folders, names[0]]), "delete"):
                try:
                    folder = self._open_folder(folders)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                try:
                    for name in names:
                        unlink_file(folder, name)
                    os.fsync(folder)
                finally:
                    os.close(folder)
                self._remove_if_empty(folders)

    def sweep(self) -> int:
        """Remove what writers that died left behind: temporary files, which no listing shows. Returns bytes freed.

        The temporary files of writers that are alive stay, on this machine and on others that share the folder.
        """
        with self._writing("", "sweep"):
            try:
                root = open_root(self._root)
            except FileNotFoundError:
                return 0
            return sum(self._sweep(root, []))

    def close(self) -> None:
        self._access.closed = True

    # Creating an object: temporary file -> write -> size -> fsync -> link -> fsync of the folder -> unlink.

    def _create(self, key: str, views: Sequence[memoryview]) -> bool:
        """False if the key exists. Either way the object is durable: a caller may act on finding it."""
        folders, name = split_key(key)
        for tries_left in reversed(range(_TRIES)):
            try:
                folder = self._make_folder(folders)
                try:
                    return self._create_in(folder, name, views)
                finally:
                    os.close(folder)
            except FileNotFoundError:
                # A delete took the last object of the folder, and the folder, just before we used it.
                self._durable.clear()
                if not tries_left:
                    raise
        raise AssertionError("unreachable")

    def _create_in(self, folder: int, name: str, views: Sequence[memoryview]) -> bool:
        if sync_existing(folder, name):
            return False
        temporary = TEMPORARY + secrets.token_hex(8)
        fd = create_temporary(folder, temporary)
        try:
            write_parts(fd, views)
            wanted, found = sum(view.nbytes for view in views), os.fstat(fd).st_size
            if wanted != found:
                raise OSError(errno.EIO, f"{wanted} bytes were written, the file has {found}")
            os.fsync(fd)
            created = link(temporary, name, folder, fd)
            if not created:
                sync_existing(folder, name)
            os.fsync(folder)
            return created
        finally:
            with suppress(OSError):  # a hidden name is left: sweep removes it
                os.unlink(temporary, dir_fd=folder)
            os.close(fd)

    def _make_folder(self, folders: Sequence[str]) -> int:
        self._make_root()
        parent = open_root(self._root)
        path = ""
        for name in folders:
            path += f"{name}/"
            try:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=parent)
                    self._durable.discard(path)
                # Also where another writer made it: its fsync may still be on the way.
                if path not in self._durable:
                    os.fsync(parent)
                    self._durable.add(path)
            except BaseException:
                os.close(parent)
                raise
            parent = step_into(parent, name)
        return parent

    def _make_root(self) -> None:
        if "" in self._durable:
            return
        for level in self._unmade or [self._root]:
            with suppress(FileExistsError):
                level.mkdir()
            with suppress(PermissionError):  # somebody else's folder which we may pass through but not read
                parent = open_root(level.parent)
                try:
                    os.fsync(parent)
                finally:
                    os.close(parent)
        self._durable.add("")

    def _holds(self, key: str, views: Sequence[memoryview]) -> bool:
        """Whether the object's bytes are the concatenation of the views."""
        import numpy as np

        fd = self._open_object(*split_key(key))
        try:
            if os.fstat(fd).st_size != sum(view.nbytes for view in views):
                return False
            chunk = np.empty(_COMPARE_BYTES, np.uint8)
            at = 0
            for view in views:
                source = np.frombuffer(view, np.uint8)
                done = 0
                while done < source.size:
                    count = os.preadv(fd, [chunk.data[: source.size - done]], at)
                    if not count or not np.array_equal(chunk[:count], source[done : done + count]):
                        return False
                    done += count
                    at += count
            return True
        finally:
            os.close(fd)

    # Reading, listing and removing, always relative to folders opened without following links.

    def _open_folder(self, folders: Sequence[str]) -> int:
        fd = open_root(self._root)
        for name in folders:
            fd = step_into(fd, name)
        return fd

    def _open_object(self, folders: Sequence[str], name: str) -> int:
        folder = self._open_folder(folders)
        try:
            return open_file(folder, name)
        finally:
            os.close(folder)

    def _list(self, prefix: str, after: str) -> Iterator[StoredObject]:
        *folders, _ = prefix.split("/")
        if any(not name or name.startswith(".") for name in folders):
            return
        with self._reporting(f"list {prefix!r} in"):
            try:
                folder = self._open_folder(folders)
            except (FileNotFoundError, NotADirectoryError):
                return
            yield from walk(folder, "".join(f"{name}/" for name in folders), prefix, after)

    def _remove_if_empty(self, folders: Sequence[str]) -> None:
        for depth in range(len(folders), 0, -1):
            try:
                parent = self._open_folder(folders[: depth - 1])
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                os.rmdir(folders[depth - 1], dir_fd=parent)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                    return
                raise
            finally:
                os.close(parent)
            self._durable.discard("".join(f"{name}/" for name in folders[:depth]))

    def _sweep(self, folder: int, path: Sequence[str]) -> Sequence[int]:
        try:
            freed = remove_dead_temporaries(folder)
            for name, is_folder in entries(folder):
                if is_folder:
                    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                        freed += self._sweep(step_into(os.dup(folder), name), [*path, name])
        finally:
            os.close(folder)
        if freed:
            self._remove_if_empty(path)
        return freed

    # What a caller did wrong, and what the system refuses.

    def _check_place(self) -> Sequence[Path]:
        """The folders that the first write will make, outermost first."""
        unmade: list[Path] = []
        with self._reporting("use"):
            for place in (self._root, *self._root.parents):
                try:
                    status = place.stat()
                except FileNotFoundError:
                    unmade.insert(0, place)
                    continue
                except NotADirectoryError:
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, f"{place} is not a folder")
                folders = [place, *self._folders_in(place)] if place == self._root else [place]
                for folder in folders if not self.read_only else ():
                    if not os.access(folder, os.W_OK | os.X_OK) and folder.exists():  # empty, a delete may take it
                        raise StorageError(
                            f"cannot write to {self._root}: {folder} is not writable by this user. Change its "
                            "permissions, choose another place, or open the store with read_only=True"
                        )
                break
        return unmade

    @staticmethod
    def _folders_in(root: Path) -> Sequence[Path]:
        """Where objects lie that stand there already: somebody else may have made them, as by copying a store."""
        try:
            return [root / name for name, is_folder in entries(root) if is_folder and is_segment(name)]
        except PermissionError:  # it may be written to and not be looked into
            return []

    @contextmanager
    def _writing(self, key: str, action: str = "write") -> Iterator[None]:
        if key:
            self._access.check_writable(action, key)
        else:
            self._access.check_all_writable(action)
        with self._reporting(f"{action} {key} in"):
            yield

    @contextmanager
    def _reporting(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            code = error.errno or 0
            reason = error.strerror or str(error)
            advice = f": {_ADVICE[code]}" if code in _ADVICE else ""
            raise StorageError(
                f"cannot {action} {self._root}: {reason}{advice}", retryable=code in _RETRYABLE
            ) from error
