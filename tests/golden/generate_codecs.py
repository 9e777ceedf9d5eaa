"""Writes the golden records of format version 1 to ``v1/codecs``; run it only for a new version of the format.

    python tests/golden/generate_codecs.py [FOLDER]

Rows come from integer arithmetic alone, so that they are the same everywhere. It must not know packs or stores.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from incremental_ckpt.codecs import codec_named
from incremental_ckpt.codecs.values import bytes_of, in_dtype
from incremental_ckpt.model import Field

GOLDEN = Path(__file__).parent / "v1" / "codecs"
NAMES = ("fp16", "bf16", "int8", "int4", "int3", "int2")
FIELDS = tuple(
    Field("weight", dtype, width) for dtype in ("float32", "float16", "bfloat16", "float64") for width in (64, 5)
)


def rows_of(field: Field) -> np.ndarray:
    """24 rows as bytes: ordinary ones of several scales, then a constant, zeros, a tiny spread beside the mean, NaN,
    infinity, denormals."""
    state, numbers = 12345, []
    for _ in range(24 * field.width):
        state = (state * 1103515245 + 12345) % 2**31
        numbers.append((state >> 8) % 20001 - 10000)
    values = np.array(numbers, dtype=np.float32).reshape(24, field.width) / np.float32(4096)
    values[:18] *= np.float32(2.0) ** (np.arange(18, dtype=np.float32)[:, None] - 9)
    values[18], values[19] = np.float32(0.1), 0
    values[20] = values[20] / 4096 + 3
    values[21, 1], values[22, 2] = np.nan, np.inf
    values[23] *= np.float32(2.0**-140)
    return bytes_of(in_dtype(values, field.dtype), field)


def encoded(codec: str, field: Field) -> tuple[np.ndarray, np.ndarray]:
    """Records, and which rows they hold."""
    found = codec_named(codec).encode(rows_of(field), field)
    return found.records, np.ones(24, np.bool_) if found.held is None else found.held


def name_of(field: Field, what: str) -> str:
    """Of an array in a codec's file: ``records``, ``held`` or ``rows`` (as decoded, bytes)."""
    return f"{field.dtype}-{field.width}-{what}"


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for codec in NAMES:
        arrays = {}
        for field in FIELDS:
            records, held = encoded(codec, field)
            kept = bytes_of(codec_named(codec).decode(records, field), field)
            arrays |= {name_of(field, w): a for w, a in (("records", records), ("held", held), ("rows", kept))}
        np.savez(folder / f"{codec}.npz", allow_pickle=False, **arrays)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN)
