"""The identity: a record is the row's bytes, little-endian.

It must not know anything but bytes.
"""

from __future__ import annotations

import numpy as np

from incremental_ckpt.codecs.base import Encoded
from incremental_ckpt.codecs.values import numbers_of
from incremental_ckpt.model import Field


class RawCodec:
    name = "raw"

    def record_bytes(self, field: Field) -> int:
        return field.row_bytes

    def encode(self, rows: np.ndarray, field: Field) -> Encoded:
        del field
        return Encoded(rows)

    def decode(self, records: np.ndarray, field: Field) -> np.ndarray:
        if field.dtype.startswith("float8"):
            return _decode_float8(records, field.dtype).reshape(len(records), field.width)
        return numbers_of(records, field).reshape(len(records), field.width)


def _decode_float8(records: np.ndarray, dtype: str) -> np.ndarray:
    exponent_bits, bias = (4, 7) if dtype == "float8_e4m3fn" else (5, 15)
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(256, dtype=np.int64)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    values = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias)) * sign
    if dtype == "float8_e4m3fn":
        values[(codes & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == 31
        values[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    decoded: np.ndarray = values.astype(np.float32)[records]
    return decoded


RAW = RawCodec()
