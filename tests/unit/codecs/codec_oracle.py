"""The records of docs/codecs.md read once more, element by element, and the bounds that it states; and rows to try."""

from __future__ import annotations

import struct

import numpy as np

from incremental_ckpt.codecs import Codec, codec_named
from incremental_ckpt.codecs.values import bytes_of, in_dtype, numbers_of
from incremental_ckpt.model import Field

BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
ROWWISE = tuple(BITS)
LOSSY = ("fp16", "bf16", *ROWWISE)
ROUNDOFF = {"float64": 0.0, "float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
DTYPES = tuple(ROUNDOFF)
CODECS: dict[str, Codec] = {name: codec_named(name) for name in LOSSY}


def field(width: int, dtype: str = "float32") -> Field:
    return Field("weight", dtype, width)


def table(values: np.ndarray, dtype: str = "float32") -> tuple[np.ndarray, Field]:
    """float32 or float64 numbers as the rows of a table of a dtype."""
    of = field(values.shape[1], dtype)
    numbers = values if dtype == "float64" else in_dtype(values.astype(np.float32), dtype)
    return bytes_of(numbers, of), of


def numbers(rows: np.ndarray, of: Field) -> np.ndarray:
    """float64."""
    return numbers_of(rows, of).astype(np.float64)


def encoded(codec: str, rows: np.ndarray, of: Field) -> tuple[np.ndarray, np.ndarray]:
    """Records, and which rows they hold."""
    found = CODECS[codec].encode(rows, of)
    return found.records, np.ones(len(rows), np.bool_) if found.held is None else found.held


def decoded_rows(codec: str, records: np.ndarray, of: Field) -> np.ndarray:
    """What a table of the dtype has after a restore, as bytes."""
    return bytes_of(CODECS[codec].decode(records, of), of)


def excess(codec: str, rows: np.ndarray, records: np.ndarray, of: Field) -> np.ndarray:
    """Per row by how much it is off, as a share of what docs/codecs.md allows; rows that are exact give 0."""
    values, kept = numbers(rows, of), numbers(decoded_rows(codec, records, of), of)
    off = np.abs(values - kept)
    span, largest = values.max(axis=1) - values.min(axis=1), np.abs(values).max(axis=1)
    if codec in BITS:
        allowed = 0.51 * span / (2 ** BITS[codec] - 1) + 2 * ROUNDOFF[of.dtype] * largest
        measured = off.max(axis=1) if codec == "int8" and not ROUNDOFF[of.dtype] else np.sqrt((off**2).mean(axis=1))
    else:
        allowed, measured = (2.0**-11 if codec == "fp16" else 2.0**-8) * largest * (1 + 2.0**-12), off.max(axis=1)
    return np.where(measured == 0, 0.0, measured / np.where(allowed == 0, 1e-300, allowed))


def read_record(codec: str, record: bytes, width: int) -> list[float]:
    """A record of row-wise quantization by docs/codecs.md alone, in Python's numbers."""
    bits = BITS[codec]
    step_code, offset_code = struct.unpack("<Hh", record[:4])
    if step_code == 0 and len(record) >= 6:
        return [struct.unpack("<f", record[2:6])[0]] * width
    step = struct.unpack("<f", struct.pack("<I", (step_code << 14) + (31 << 23)))[0]
    payload = int.from_bytes(record[4:], "little")
    codes = [(payload >> (i * bits)) & (2**bits - 1) for i in range(width)]
    exact = [step * (code + offset_code * 2.0 ** (bits - 9)) for code in codes]
    return [struct.unpack("<f", struct.pack("<f", value))[0] for value in exact]


def ordinary(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """Rows of several kinds and scales; float32."""
    kinds = [
        rng.standard_normal((rows, width)),
        rng.uniform(-1, 1, (rows, width)),
        rng.standard_t(3, (rows, width)),
        rng.standard_normal((rows, width)) + rng.uniform(-8, 8, (rows, 1)),
        rng.standard_normal((rows, width)) ** 2,
    ]
    scales = 10.0 ** rng.uniform(-3, 2, (rows, 1))
    return (np.concatenate(kinds)[rng.permutation(5 * rows)[:rows]] * scales).astype(np.float32)


def of_any_bits(rng: np.random.Generator, rows: int, of: Field) -> np.ndarray:
    """Rows of bytes that nobody chose: NaN, infinities, denormals and every magnitude among them. Some repeat one
    number, some have one foreign number in an ordinary row."""
    size = of.row_bytes // of.width
    raw = rng.integers(0, 256, (rows, of.width, size), dtype=np.uint8)
    kind = rng.integers(0, 3, rows)
    raw[kind == 0] = raw[kind == 0][:, :1]
    good = table(ordinary(rng, rows, of.width), of.dtype)[0].reshape(raw.shape)
    foreign = raw[kind == 1][:, 0].copy()
    raw[kind == 1] = good[kind == 1]
    raw[np.flatnonzero(kind == 1), rng.integers(0, of.width, len(foreign))] = foreign
    return raw.reshape(rows, of.row_bytes)


def rows_of_all_kinds(seed: int, width: int, dtype: str) -> tuple[np.ndarray, Field]:
    """Of both signs and of one, with zeros of both signs, NaN, infinities and ties, with offsets that barely fit, and
    with steps that round a hair below a tie."""
    rng = np.random.default_rng(seed)
    values = ordinary(rng, 40, width)
    zeros = np.where(rng.random(values.shape) < 0.3, np.float32(0), values)
    zeros = np.where(rng.random(values.shape) < 0.3, np.float32(-0.0), zeros)
    ties = rng.integers(-9, 10, values.shape).astype(np.float32) / 4
    steps = 1 + 2.0**-10 * (1 - rng.uniform(0, 0.01, (40, 1)))
    places = rng.uniform(0, 255, values.shape)
    places[:, :1], places[:, 1:2] = 0, 255
    far = (steps * (places + rng.integers(-32760, 32760, (40, 1)) / 2 + 0.2499)).astype(np.float32)
    of = field(width, dtype)
    ordinary_ones = [table(v, dtype)[0] for v in (values, np.abs(values), -np.abs(values), zeros, ties, far)]
    return np.concatenate([*ordinary_ones, of_any_bits(rng, 60, of)]), of
