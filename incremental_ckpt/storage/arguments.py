"""What every store checks of its arguments: keys, parts and byte ranges.

It must not know any store, nor what the bytes mean.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from incremental_ckpt.errors import CorruptionError, StorageError
from incremental_ckpt.storage.base import Buffer

_ZEROED_BELOW = 1 << 16
"""Bytes, from which on it pays not to fill a buffer with zeros before it is read into."""

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def is_segment(name: str) -> bool:
    """Whether a name may stand between the slashes of a key: ``[A-Za-z0-9._-]``, no leading dot."""
    return _SEGMENT.fullmatch(name) is not None


def split_key(key: str) -> tuple[list[str], str]:
    """The folders and the name of a key. Raises StorageError for a key that no store takes."""
    segments = key.split("/")
    if not all(map(is_segment, segments)):
        raise StorageError(
            f"not a valid key: {key!r}. Keys are segments of [A-Za-z0-9._-] without a leading dot, joined by '/'"
        )
    return segments[:-1], segments[-1]


def byte_views(parts: Sequence[Buffer]) -> list[memoryview]:
    """The parts as flat views of unsigned bytes, without a copy and without the empty ones.

    Raises:
        TypeError: a part is not C-contiguous.
    """
    return [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]


def check_range(key: str, start: int, end: int | None) -> None:
    """Raises ValueError for what is no range of any object."""
    if start < 0 or (end is not None and end < start):
        raise ValueError(f"not a byte range: {start}:{end} of {key!r}")


def range_end(key: str, size: int, start: int, end: int | None) -> int:
    """Where a read of ``start:end`` of an object of ``size`` bytes ends, checked before anything is allocated.

    Raises:
        CorruptionError: the object is too short.
        ValueError: not a range.
    """
    check_range(key, start, end)
    last = size if end is None else end
    if max(start, last) > size:
        raise short_object(key, max(start, last), size)
    return last


def short_object(key: str, wanted: int, size: int) -> CorruptionError:
    """An object that ends before byte ``wanted``."""
    return CorruptionError(
        f"{key}: the object is truncated: {wanted} bytes are needed, it has {size}",
        key=key,
        expected=f"at least {wanted} bytes",
        found=f"{size} bytes",
    )


def read_target(key: str, into: memoryview, length: int) -> memoryview:
    """``into`` as a flat view of bytes; ValueError unless it is writable and has exactly ``length`` bytes."""
    if into.readonly or into.nbytes != length:
        raise ValueError(
            f"{key}: the buffer to read into must be writable and of {length} bytes, "
            f"not {'read-only' if into.readonly else 'writable'} and of {into.nbytes}"
        )
    return into.cast("B") if length else into


def new_or_given(key: str, length: int, into: memoryview | None) -> memoryview:
    """Where to read ``length`` bytes to: a new buffer, or ``into`` as ``read_target`` checks it."""
    if into is not None:
        return read_target(key, into, length)
    if length < _ZEROED_BELOW:
        return memoryview(bytearray(length))
    import numpy as np  # here: loading it takes longer than `ickpt ls` of a thousand checkpoints

    return np.empty(length, np.uint8).data
