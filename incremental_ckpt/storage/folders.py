"""Steps below an open folder of the file system, by descriptor and name, that never follow a symbolic link.

It must not know where the root of a store is, nor when something is durable.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from incremental_ckpt.storage.arguments import is_segment
from incremental_ckpt.storage.base import StoredObject

TEMPORARY = ".tmp-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a FIFO that somebody left in the folder must not hang us; regular files do not care.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def open_root(path: str | os.PathLike[str]) -> int:
    """Open a folder by its whole path, whose links are followed: the user named it."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def step_into(folder: int, name: str) -> int:
    """Open the folder ``name`` below an open folder, which is closed."""
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, f"{name} is a symbolic link") from None
        raise
    finally:
        os.close(folder)


def open_file(folder: int, name: str, mode: int = os.O_RDONLY) -> int:
    fd = os.open(name, _FILE | mode, dir_fd=folder)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, f"{name} is a folder")
    raise OSError(errno.EINVAL, f"{name} is not a regular file")


def create_temporary(folder: int, name: str) -> int:
    """Create a file and lock it, which tells ``remove_dead_temporaries`` that its writer is alive.

    The system unlocks it when the writer dies. A sweep that comes before the lock removes the file: linking it raises
    FileNotFoundError then, and the writer starts again.
    """
    fd = os.open(name, _CREATE, 0o666, dir_fd=folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Locked by a sweep, or a file system without locks: there a sweep cannot lock it either, and lets it be.
        if error.errno not in {errno.EWOULDBLOCK, *_NO_LOCKS}:
            os.close(fd)
            raise
    return fd


def remove_dead_temporaries(folder: int) -> list[int]:
    """Remove the temporary files whose writers died; returns the bytes that each one had to itself."""
    with os.scandir(folder) as found:
        names = [entry.name for entry in found if entry.name.startswith(TEMPORARY)]
    freed = []
    for name in names:
        try:
            fd = open_file(folder, name, os.O_RDWR)  # network file systems lock writable descriptors only
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=folder)
            status = os.fstat(fd)
            freed.append(0 if status.st_nlink else status.st_size)
        except (FileNotFoundError, BlockingIOError):
            continue  # its writer finished, or lives
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        finally:
            os.close(fd)
    return freed


def sync_existing(folder: int, name: str) -> bool:
    """Make an object that another writer may just have linked durable; False if there is none."""
    try:
        fd = open_file(folder, name)
    except FileNotFoundError:
        return False
    try:
        os.fsync(fd)
        os.fsync(folder)
    finally:
        os.close(fd)
    return True


def link(temporary: str, name: str, folder: int, fd: int) -> bool:
    """Give the temporary file, open as ``fd``, its second name; False if the name is taken."""
    try:
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        # On a network file system the answer of our own link may have been lost and the call repeated.
        return os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(fd))
    return True


def unlink_file(folder: int, name: str) -> None:
    """Remove a file or a link; a folder of that name, or nothing, is left as it is."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise


def entries(folder: int | os.PathLike[str]) -> list[tuple[str, bool]]:
    """Names without a leading dot, and whether they are folders, in the order of the keys that they lead to."""
    with os.scandir(folder) as found:
        named = [(e.name, e.is_dir(follow_symlinks=False)) for e in found if not e.name.startswith(".")]
    # The keys below a folder continue with "/", which sorts after "-" and "." and before digits and letters.
    return sorted(named, key=lambda one: f"{one[0]}/" if one[1] else one[0])


def walk(folder: int, path: str, prefix: str, after: str) -> Iterator[StoredObject]:
    """The objects below an open folder, which is closed at the end. What vanishes meanwhile is left out.

    Symbolic links are listed, with their own size: who asks for their bytes is refused.
    """
    try:
        for name, is_folder in entries(folder):
            if not is_folder:
                key = path + name
                if key <= after or not key.startswith(prefix):
                    continue
                try:
                    size = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
                yield StoredObject(key, size)
                continue
            below = f"{path}{name}/"
            matches = below.startswith(prefix) or prefix.startswith(below)
            if not matches or not (below > after or after.startswith(below)):
                continue
            child = -1
            with suppress(FileNotFoundError, NotADirectoryError):
                child = _enter(folder, name)
            if child >= 0:
                yield from walk(child, below, prefix, after)
    finally:
        os.close(folder)


def _enter(folder: int, name: str) -> int:
    try:
        return step_into(os.dup(folder), name)
    except PermissionError:
        if is_segment(name):
            raise
        return -1  # such as lost+found: no key leads through it
