"""The codec protocol and the codecs by name.

It must not know tables, packs or stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from incremental_ckpt.codecs.raw import RawCodec
from incremental_ckpt.errors import FormatError
from incremental_ckpt.model import Field


@dataclass(frozen=True)
class Encoded:
    """Records, and which of them stand for their rows.

    Attributes:
        records: ``uint8 [n, record_bytes]``.
        held: ``bool [n]``: False where the codec cannot hold the row within its bound; such a row goes into a raw entry
            behind this one, and its record is never read. None: all are held.
    """

    records: np.ndarray
    held: np.ndarray | None = None

    @classmethod
    def of(cls, records: np.ndarray, held: np.ndarray) -> Encoded:
        return cls(records, None if held.all() else held)


class Codec(Protocol):
    """Rows to records, row by row: a record depends on its row alone and its size on the field alone."""

    name: str

    def record_bytes(self, field: Field) -> int:
        """Bytes of one record."""

    def encode(self, rows: np.ndarray, field: Field) -> np.ndarray:
        """``uint8 [n, field.row_bytes]`` to ``uint8 [n, record_bytes]``; may return its argument."""

    def decode(self, records: np.ndarray, field: Field) -> np.ndarray:
        """``uint8 [n, record_bytes]`` to ``[n, field.width]`` in the field's dtype, or float32 where numpy lacks it."""


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawCodec(),)}


def codec_named(name: str) -> Codec:
    """Raises FormatError for a codec that this version does not know."""
    if name not in _CODECS:
        raise FormatError(
            f"codec {name!r} is not known to this version; it knows: {', '.join(sorted(_CODECS))}. Upgrade "
            "incremental_ckpt"
        )
    return _CODECS[name]


def decode_records(records: np.ndarray, codec: str, field: Field) -> np.ndarray:
    """Records of an entry as ``[n, field.width]``."""
    return codec_named(codec).decode(records, field)
