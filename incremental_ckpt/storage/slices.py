"""Byte ranges of a list of buffers, as views and as a file to send, without copying.

It must not know keys, stores or where the bytes go.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from zlib import crc32


class Concatenation:
    """What is in several views of bytes, one behind the other."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._ends = [*accumulate(view.nbytes for view in views)]
        self.size = self._ends[-1] if self._ends else 0

    def between(self, start: int, end: int) -> list[memoryview]:
        """Views of the bytes ``start:end``; empty ones are left out."""
        found = []
        number = bisect_right(self._ends, start)
        while start < end:
            view = self._views[number]
            begin = self._ends[number] - view.nbytes
            found.append(view[start - begin : end - begin])
            start = self._ends[number]
            number += 1
        return found


def checksum(views: Sequence[memoryview]) -> int:
    """The CRC-32 of the views, one behind the other."""
    value = 0
    for view in views:
        value = crc32(view, value)
    return value


class Upload(io.RawIOBase):
    """A seekable file of some views, whose reads are views too.

    Args:
        meanwhile: called before every read; what it raises breaks the upload off.
    """

    def __init__(self, views: Sequence[memoryview], meanwhile: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._content = Concatenation(views)
        self._meanwhile = meanwhile
        self._at = 0

    def __len__(self) -> int:
        return self._content.size

    def read(self, size: int = -1) -> memoryview:
        """The next ``size`` bytes (all if negative): a view, or a copy where they are in several; b'' at the end."""
        self._meanwhile()
        end = self._content.size if size < 0 else min(self._at + size, self._content.size)
        found = self._content.between(self._at, end)
        self._at = max(self._at, end)
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._content.size}[whence]
        self._at = origin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True
