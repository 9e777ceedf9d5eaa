"""The bytes of rows as float32 numbers and back, for the dtypes that tables are made of.

It must not know codecs or records.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from incremental_ckpt.model import Field

Float32s = npt.NDArray[Any]
"""float32, which numpy's stubs lose in a division."""
_LEAST_NORMAL_FLOAT16 = 113 << 23
_FLOAT16_OVERFLOW = 143 << 23
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""By dtype: an element rounded to it is off by at most this share of itself."""


def numbers_of(rows: np.ndarray, field: Field) -> np.ndarray:
    """``uint8 [n, field.row_bytes]`` as ``[n, width]`` in the field's dtype, bfloat16 as float32."""
    rows = np.ascontiguousarray(rows)
    if field.dtype == "bfloat16":
        return widened_bfloat16(rows.view("<u2"))
    return rows.view(np.dtype(field.dtype).newbyteorder("<"))


def float32_of(rows: np.ndarray, field: Field) -> Float32s:
    """As ``numbers_of``, but float32: exact unless the field is float64."""
    return np.asarray(numbers_of(rows, field), dtype=np.float32)


def widened_bfloat16(halves: npt.NDArray[np.uint16]) -> Float32s:
    """bfloat16 is float32 with the low half of the mantissa cut off."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def bfloat16_of(values: Float32s) -> npt.NDArray[np.uint16]:
    """Rounded to nearest, ties to even. NaN is not looked after."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)


def float16_of(values: Float32s) -> npt.NDArray[np.uint16]:
    """The bits of ``values.astype(np.float16)``, in a fifth of its time. NaN is not looked after."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits & np.uint32(0x7FFFFFFF)
    small = np.flatnonzero(rounded < np.uint32(_LEAST_NORMAL_FLOAT16))
    large = np.flatnonzero(rounded >= np.uint32(_FLOAT16_OVERFLOW))
    odd = rounded >> 13
    odd &= 1
    rounded += odd
    rounded += np.uint32(0xFFF)
    rounded -= np.uint32(112 << 23)
    rounded >>= 13
    halves = rounded.astype(np.uint16)
    halves |= ((bits >> 16) & 0x8000).astype(np.uint16)
    for places in (small, large):
        halves.reshape(-1)[places] = values.reshape(-1)[places].astype(np.float16).view(np.uint16)
    return halves


def in_dtype(values: Float32s, dtype: str) -> np.ndarray:
    """float32 numbers in a field's dtype, to nearest, ties to even; bfloat16 as float32 that bfloat16 can hold."""
    if dtype == "float32":
        return values
    if dtype == "bfloat16":
        return widened_bfloat16(bfloat16_of(values))
    return values.astype(np.dtype(dtype))


def bytes_of(values: np.ndarray, field: Field) -> np.ndarray:
    """What ``in_dtype`` gave as ``uint8 [n, field.row_bytes]``: the rows of the live table, little-endian."""
    if field.dtype == "bfloat16":
        return bfloat16_of(values).astype("<u2").view(np.uint8).reshape(len(values), field.row_bytes)
    little = np.ascontiguousarray(values, dtype=np.dtype(field.dtype).newbyteorder("<"))
    return little.view(np.uint8).reshape(len(values), field.row_bytes)
