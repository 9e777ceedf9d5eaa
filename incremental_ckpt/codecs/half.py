"""Sixteen bits an element: ``fp16`` keeps 11 significant bits in a small range, ``bf16`` keeps 8 in float32's range.

It must not know rows from each other, tables or packs.
"""

from __future__ import annotations

import numpy as np

from incremental_ckpt.codecs.base import Encoded
from incremental_ckpt.codecs.values import bfloat16_of, float16_of, float32_of, in_dtype, numbers_of, widened_bfloat16
from incremental_ckpt.model import Field

_BLOCK_BYTES = 1 << 18


class HalfCodec:
    """Elements rounded to nearest, ties to even.

    A row is held if every element is finite before and after, and if its largest magnitude is a normal number of the
    codec's dtype or the row is kept exactly. No element is then off by more than 2^-11 (``fp16``) or 2^-8 (``bf16``)
    times that largest magnitude.
    """

    def __init__(self, name: str, *, least_normal: float, overflow: float) -> None:
        """Args: overflow: the least magnitude that rounds to infinity."""
        self.name = name
        self._least_normal = np.float32(least_normal)
        self._overflow = np.float32(overflow)

    def record_bytes(self, field: Field) -> int:
        return 2 * field.width

    def encode(self, rows: np.ndarray, field: Field) -> Encoded:
        records = np.empty((len(rows), 2 * field.width), dtype=np.uint8)
        held = np.empty(len(rows), dtype=np.bool_)
        step = max(1, _BLOCK_BYTES // (4 * field.width))
        with np.errstate(all="ignore"):
            for start in range(0, len(rows), step):
                block = slice(start, start + step)
                held[block] = self._encode_block(rows[block], field, records[block])
        return Encoded.of(records, held)

    def _encode_block(self, rows: np.ndarray, field: Field, records: np.ndarray) -> np.ndarray:
        values = float32_of(rows, field)
        halves = bfloat16_of(values) if self.name == "bf16" else float16_of(values)
        records[...] = halves.astype("<u2", copy=False).view(np.uint8)
        largest = np.abs(values).max(axis=1, initial=0)
        held: np.ndarray = largest < self._overflow  # False for NaN
        tiny = np.flatnonzero(largest < self._least_normal)
        held[tiny] = (self.decode(records[tiny], field) == numbers_of(rows[tiny], field)).all(axis=1)
        if field.dtype in ("float16", "bfloat16"):
            held &= np.isfinite(self.decode(records, field)).all(axis=1)
        records[~held] = 0
        return held

    def decode(self, records: np.ndarray, field: Field) -> np.ndarray:
        halves = np.ascontiguousarray(records).view("<u2" if self.name == "bf16" else "<f2")
        return in_dtype(self._widened(halves), field.dtype)

    def _widened(self, halves: np.ndarray) -> np.ndarray:
        return widened_bfloat16(halves) if self.name == "bf16" else halves.astype(np.float32)


FP16 = HalfCodec("fp16", least_normal=2.0**-14, overflow=65520.0)
BF16 = HalfCodec("bf16", least_normal=2.0**-126, overflow=2.0**128 - 2.0**119)
