"""Hands the loops of a folder arrays between pages that nobody may touch: a byte read or written beside them ends this
process. Run by test_compiled.py."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np

from incremental_ckpt.codecs.bits import payload_bytes
from incremental_ckpt.codecs.compiled import SpanLoop, span_loop

PROT_NONE = 0
WIDTHS = (*range(1, 35), 63, 64, 65, 255, 256, 257, 1029)
COUNTS = (1, 15, 16, 17, 33)
LIBC = ctypes.CDLL(None, use_errno=True)


def fenced(size: int, *, at_the_end: bool) -> np.ndarray:
    """``uint8 [size]``: its last byte, or its first, lies at the fence."""
    between = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = np.frombuffer(mmap.mmap(-1, between + 2 * mmap.PAGESIZE), np.uint8)
    for fence in (0, mmap.PAGESIZE + between):
        if LIBC.mprotect(ctypes.c_void_p(pages.ctypes.data + fence), ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = mmap.PAGESIZE + (between - size if at_the_end else 0)
    return pages[start : start + size]


def encode_and_decode(loop: SpanLoop, rng: np.random.Generator, width: int, bits: int, *, at_the_end: bool) -> None:
    size = 4 + payload_bytes(width, bits)
    for count in COUNTS:
        records = fenced(count * size, at_the_end=at_the_end).reshape(count, size)
        values = fenced(count * width * 4, at_the_end=at_the_end).view(np.float32).reshape(count, width)
        if bits in loop.ENCODED_BITS:
            values[...] = rng.standard_normal((count, width), np.float32)
            loop.encode(values, bits, records, fenced(count, at_the_end=at_the_end).view(np.bool_))
        records[...] = rng.integers(0, 256, records.shape, dtype=np.uint8)
        records[::3, :2] = 0
        loop.decode(records, bits, values)


def main(folder: Path) -> None:
    loop, rng = span_loop(folder), np.random.default_rng(0)
    assert loop is not None
    for width in WIDTHS:
        for bits in loop.DECODED_BITS:
            encode_and_decode(loop, rng, width, bits, at_the_end=True)
            encode_and_decode(loop, rng, width, bits, at_the_end=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
