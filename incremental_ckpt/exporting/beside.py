"""A hidden folder beside a place that is to be written whole: ours while we live, swept by the next writer once dead.

It must not know what is written there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME = re.compile(r"\.(.+)\.ickpt-[0-9a-f]{16}", re.DOTALL)


@contextmanager
def hidden_folder(place: Path) -> Iterator[Path]:
    """A new folder beside ``place``, removed at the end; those of writers to the same place that died go first.

    A writer may be killed at any moment, by SIGKILL or a second Ctrl-C: the lock on a file in its folder, which the
    system ends with it, tells whether it lives.
    """
    for found in _folders_of(place):
        _remove_if_dead(found, place)
    folder, lock = _make(place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _folders_of(place: Path) -> list[Path]:
    try:
        named = [(found, _NAME.fullmatch(found.name)) for found in place.parent.iterdir()]
    except PermissionError:  # it may be written to and not be looked into
        return []
    return [found for found, match in named if match is not None and match[1] == place.name]


def _lock_of(folder: Path, place: Path) -> Path:
    return folder / f"{place.name}.lock"  # never the name of what is written beside it


def _make(place: Path) -> tuple[Path, int]:
    while True:
        folder = place.parent / f".{place.name}.ickpt-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        try:
            lock = os.open(_lock_of(folder, place), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # somebody has swept the folder before there was a lock in it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)  # somebody has it just to see whether we live, and sweeps the folder
            continue
        except OSError:
            pass  # a file system without locks: nobody can lock it there, so nobody sweeps
        if not _lock_of(folder, place).exists():
            os.close(lock)
            continue
        return folder, lock


def _remove_if_dead(folder: Path, place: Path) -> None:
    with suppress(OSError):  # not ours, or gone by now: it is in nobody's way
        if folder.is_symlink():
            return
        try:
            lock = os.open(_lock_of(folder, place), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENOENT:
                folder.rmdir()  # its writer died, or is to make the lock just now and then makes another folder
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
