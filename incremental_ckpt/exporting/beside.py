"""A hidden folder beside a place that is to be written whole: ours while we live, swept by the next writer once dead;
and the step from there to the place, onto nothing that exists.

It must not know what is written there.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WRITTEN = "export"
"""What is written has this name at first: those who write may not take every name that the file system does."""

_LOCK, _CLAIM = "lock", "claim"
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@contextmanager
def hidden_folder(place: Path) -> Iterator[Path]:
    """A new folder beside ``place``, removed at the end; those of writers to the same place that died go first.

    A writer may be killed at any moment, by SIGKILL or a second Ctrl-C: the lock on a file in its folder, which the
    system ends with it, tells whether it lives.
    """
    sweep(place)
    folder, lock = _make(place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep(place: Path) -> None:
    """Remove what dead writers to ``place`` have left, beside it and under its name."""
    try:
        found = [path for path in place.parent.iterdir() if path.name.startswith(_prefix(place))]
    except OSError:  # there is none yet, or it may be written to and not be looked into
        return
    for folder in found:
        _remove_if_dead(folder, place)


def publish(folder: Path, place: Path) -> bool:
    """Move what was written out of its hidden folder. False: something exists at ``place``, and stays as it is.

    A name is taken by what creates it if it is absent: a link, or where that cannot be (of a folder; on a file system
    without links) an empty claim, onto which the system then moves what was written. A folder cannot be moved onto one
    that holds something by then.
    """
    written, claim = folder / WRITTEN, folder / _CLAIM
    if written.is_file():
        try:
            os.link(written, place)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            return True
    claim.touch()  # from here on something empty may be left of us at the place
    try:
        if written.is_dir():
            place.mkdir()
        else:
            os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        claim.unlink()
        return False
    try:
        written.replace(place)
    except BaseException as error:
        _remove_claim(place)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _remove_claim(place: Path) -> None:
    with suppress(OSError):
        if place.is_symlink():
            return
        if place.is_dir():
            place.rmdir()  # only if it is empty
        elif place.stat().st_size == 0:
            place.unlink()


def _prefix(place: Path) -> str:
    """Short, since the place's name may be as long as names can be."""
    return f".ickpt-{hashlib.blake2b(os.fsencode(place.name), digest_size=8).hexdigest()}-"


def _make(place: Path) -> tuple[Path, int]:
    while True:
        folder = place.parent / f"{_prefix(place)}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # somebody has swept the folder before there was a lock in it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)  # somebody has it just to see whether we live, and sweeps the folder
            continue
        except OSError:
            pass  # a file system without locks: nobody can lock it there, so nobody sweeps
        if not (folder / _LOCK).exists():
            os.close(lock)
            continue
        return folder, lock


def _remove_if_dead(folder: Path, place: Path) -> None:
    with suppress(OSError):  # not ours, or gone by now: it is in nobody's way
        if folder.is_symlink():
            return
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENOENT:
                folder.rmdir()  # its writer died, or is to make the lock just now and then makes another folder
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / _CLAIM).exists():
                _remove_claim(place)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
