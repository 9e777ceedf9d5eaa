"""Sets of row ids as portable 64-bit roaring bitmaps (docs/format.md, section 6).

It must not know what the rows carry or where the bytes lie.
"""

from __future__ import annotations

import struct
from array import array
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap, BitMap64

from incremental_ckpt.errors import CorruptionError

Ids = npt.NDArray[np.int64]


def encode_rows(rows: Ids) -> bytes:
    """The bytes of the set of ``rows``: int64, not negative, strictly ascending.

    Raises:
        ValueError: rows of another dtype or shape, negative, repeated or out of order.
    """
    if rows.dtype != np.int64 or rows.ndim != 1:
        raise ValueError(f"row ids must be a vector of int64, not {rows.dtype} of shape {rows.shape}")
    if rows.size and (rows[0] < 0 or not (rows[1:] > rows[:-1]).all()):
        raise ValueError("row ids must be strictly ascending and not negative")
    if not rows.size:
        return struct.pack("<Q", 0)
    # BitMap takes an array of uint32 by pointer; BitMap64 takes nothing as fast. Nearly all sets have one bucket.
    buckets = rows >> 32
    starts = [0, *(np.flatnonzero(buckets[1:] != buckets[:-1]) + 1).tolist(), rows.size]
    parts = [struct.pack("<Q", len(starts) - 1)]
    for start, end in pairwise(starts):
        low = array("I")
        low.frombytes(rows[start:end].astype(np.uint32).view(np.uint8).data)
        parts += [struct.pack("<I", int(buckets[start])), BitMap(low, optimize=True).serialize()]
    return b"".join(parts)


def decode_rows(raw: bytes | memoryview, *, count: int, rows: int, key: str) -> Ids:
    """The row ids of a set, ascending: exactly ``count``, all below ``rows``.

    Memory and time are bounded by the size of ``raw`` and by ``count``, whatever the bytes claim.

    Raises:
        CorruptionError: not a portable 64-bit roaring bitmap, another number of ids, or one beyond ``rows``.
    """
    raw = bytes(raw)
    try:
        bitmap = BitMap64.deserialize(raw)
        found = len(bitmap)
    except (ValueError, IndexError, OverflowError) as error:
        raise _corrupt(key, "it is not a portable 64-bit roaring bitmap", "", str(error)) from error
    # The counts are compared before the ids are unfolded: a few bytes of runs can stand for billions of ids.
    if found != count:
        raise _corrupt(key, "it has another number of ids than recorded", str(count), str(found))
    # Bytes behind the bitmap and empty buckets are not read by the bitmap, and so are not written again.
    filled = len(bitmap.serialize())
    if filled != len(raw):
        raise _corrupt(key, "it does not fill its bytes", f"{len(raw)} bytes", f"{filled} bytes")
    ids = np.frombuffer(bitmap.to_array(), dtype=np.int64) if found else np.empty(0, dtype=np.int64)
    if found and not (ids[0] >= 0 and ids[-1] < rows and (ids[1:] > ids[:-1]).all()):
        raise _corrupt(key, "it has ids that the shard lacks", f"ascending ids below {rows}", f"up to {int(ids[-1])}")
    return ids


def _corrupt(key: str, why: str, expected: str, found: str) -> CorruptionError:
    return CorruptionError(
        f"a row set in {key} is damaged: {why} (expected {expected or 'one'}, found {found}). "
        "Restore the object from a copy, or resume from an ancestor",
        key=key,
        expected=expected,
        found=found,
    )
