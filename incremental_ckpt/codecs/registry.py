"""The codecs by name, and which of them a field's rows are written with.

It must not know tables, packs or stores.
"""

from __future__ import annotations

import numpy as np

from incremental_ckpt.codecs.base import Codec, Encoded
from incremental_ckpt.codecs.half import BF16, FP16
from incremental_ckpt.codecs.raw import RAW
from incremental_ckpt.codecs.rowwise import INT2, INT3, INT4, INT8
from incremental_ckpt.errors import FormatError
from incremental_ckpt.model import WEIGHT, Field

_CODECS: dict[str, Codec] = {codec.name: codec for codec in (RAW, FP16, BF16, INT8, INT4, INT3, INT2)}
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


def codec_named(name: str) -> Codec:
    """Raises FormatError for a codec that this version does not know."""
    if name not in _CODECS:
        raise FormatError(
            f"codec {name!r} is not known to this version; it knows: {', '.join(sorted(_CODECS))}. Upgrade "
            "incremental_ckpt"
        )
    return _CODECS[name]


def codec_for(name: str, field: Field) -> Codec:
    """The codec of that name, or raw where the field's elements are not numbers to be rounded (counters, bytes), where
    its records would be no smaller than its rows, and where the optimizer has one element a row."""
    codec = codec_named(name)
    if field.dtype not in _FLOATS or codec.record_bytes(field) >= field.row_bytes:
        return RAW
    # FBGEMM counts iterations in float32 (prev_iter, row_counter): 100,000 would come back from bf16 as 99,840. Exact
    # is cheap here, and the counters' names are FBGEMM's, not ours.
    counts = field.name != WEIGHT and field.width == 1
    return RAW if counts else codec


def encode_values(rows: np.ndarray, name: str, field: Field) -> tuple[str, Encoded]:
    """Records by the codec of that name, or by raw where that takes no more space in all.

    Args:
        rows: ``uint8 [n, field.row_bytes]``.

    Returns:
        The codec's name and the records.
    """
    codec = codec_for(name, field)
    encoded = codec.encode(rows, field)
    if encoded.held is not None:
        beside = len(rows) - int(np.count_nonzero(encoded.held))
        if encoded.records.size + beside * field.row_bytes >= rows.size:
            return RAW.name, RAW.encode(rows, field)
    return codec.name, encoded


def decode_records(records: np.ndarray, codec: str, field: Field) -> np.ndarray:
    """Records of an entry as ``[n, field.width]``."""
    return codec_named(codec).decode(records, field)
