"""File systems that are full: a small one of its own where mounting is allowed, and a limit on the size of files.

It must not know what is written to them.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PAGE = 4096
PAGES = 512


class MountedDisk:
    """A tmpfs of 2 MiB. Bytes that it has no room for are refused with ENOSPC by the kernel itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / ".ballast"

    @contextmanager
    def room_for(self, pages: int) -> Iterator[None]:
        """With so many pages of 4 KiB left."""
        with self._ballast.open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(bytes(PAGE))
        os.truncate(self._ballast, max(0, self._ballast.stat().st_size // PAGE - pages) * PAGE)
        try:
            yield
        finally:
            self._ballast.unlink()


class LimitedFiles:
    """A folder where files may not grow beyond so many pages: EFBIG, by the kernel itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def room_for(self, pages: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (pages * PAGE // 8, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


FullDisk = MountedDisk | LimitedFiles


@contextmanager
def small_disk(folder: Path) -> Iterator[FullDisk]:
    """A disk of its own if this user may mount, else the limit."""
    folder.mkdir()
    options = f"size={PAGES * PAGE},mode=777"
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "incremental-ckpt-test", str(folder)], capture_output=True, check=False
    )
    if mount.returncode:
        yield LimitedFiles(folder)
        return
    try:
        yield MountedDisk(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def limited_files(folder: Path) -> Iterator[LimitedFiles]:
    folder.mkdir()
    yield LimitedFiles(folder)
