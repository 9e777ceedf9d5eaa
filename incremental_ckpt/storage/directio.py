"""Writes byte views to an open file, past the page cache where the file system lets it.

It must not know names, folders or durability: its caller opens, syncs and closes the file.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # loaded by the first direct write: reading does without it
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

DIRECT_FROM = 1 << 20
"""Objects of this many bytes and more are written past the page cache, so that they do not slow training down."""

ALIGNMENT = 4096
BOUNCE_BYTES = 4 << 20
_POOLED = 4
_IOV_MAX = 512
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class _BouncePool:
    """Page-aligned buffers that are kept once their pages have been touched: fresh ones cost a page fault per 4 KiB."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self) -> Iterator[Bytes]:
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            import numpy as np

            buffer = np.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), np.uint8)
        yield buffer
        with self._lock:
            if len(self._free) < _POOLED:
                self._free.append(buffer)


_BOUNCE = _BouncePool()


def write_parts(fd: int, parts: Sequence[memoryview]) -> None:
    """Append all parts to the file. OSError as the system raises it; what was written by then is undefined."""
    if sum(part.nbytes for part in parts) >= DIRECT_FROM and _set_direct(fd, True):
        _write_direct(fd, parts)
    else:
        _write_vectored(fd, parts)


def _set_direct(fd: int, on: bool) -> bool:
    if not _O_DIRECT:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _write_direct(fd: int, parts: Sequence[memoryview]) -> None:
    import numpy as np

    direct = True
    with _BOUNCE.borrow() as bounce:
        filled = 0
        for part in parts:
            source = np.frombuffer(part, np.uint8)
            taken = 0
            while taken < source.size:
                count = min(source.size - taken, bounce.size - filled)
                bounce[filled : filled + count] = source[taken : taken + count]
                filled += count
                taken += count
                if filled == bounce.size:
                    direct = _write_block(fd, bounce.data, direct)
                    filled = 0
        _write_block(fd, bounce.data[:filled], direct)


def _write_block(fd: int, block: memoryview, direct: bool) -> bool:
    """Write a block; returns whether the file still takes direct writes. Only whole units can be written directly."""
    whole = block.nbytes - block.nbytes % ALIGNMENT
    done = 0
    while done < block.nbytes:
        if direct and done >= whole:
            _set_direct(fd, False)
            direct = False
        try:
            done += os.write(fd, block[done:whole] if direct else block[done:])
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                raise
            _set_direct(fd, False)  # the flag was taken, or a short write ended within a unit
            direct = False
    return direct


def _write_vectored(fd: int, parts: Sequence[memoryview]) -> None:
    for first in range(0, len(parts), _IOV_MAX):
        batch = list(parts[first : first + _IOV_MAX])
        while batch:
            written = os.writev(fd, batch)
            whole = 0
            while whole < len(batch) and written >= batch[whole].nbytes:
                written -= batch[whole].nbytes
                whole += 1
            del batch[:whole]
            if written:
                batch[0] = batch[0][written:]
