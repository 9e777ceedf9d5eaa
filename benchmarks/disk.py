"""A bare write past the page cache, as fast as one thread makes the disk go.

It must not know what is written.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
from timing import seconds_of

_BLOCK = 4 << 20


def bare_write_seconds(path: Path, nbytes: int) -> tuple[float, bool]:
    """Write ``nbytes`` (whole blocks of 4 MiB) and fsync.

    Returns:
        The seconds, and whether the file system took O_DIRECT. The file is removed.
    """
    block = mmap.mmap(-1, _BLOCK)
    block.write(np.random.default_rng(0).bytes(_BLOCK))
    fd, direct = _open(path)
    try:

        def write() -> None:
            for _ in range(max(1, -(-nbytes // _BLOCK))):
                done = 0
                while done < _BLOCK:
                    done += os.write(fd, memoryview(block)[done:])
            os.fsync(fd)

        return seconds_of(write), direct
    finally:
        os.close(fd)
        path.unlink()


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # made before the flag was refused
        return os.open(path, flags), False
