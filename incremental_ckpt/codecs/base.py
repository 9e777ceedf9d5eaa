"""What a codec is.

It must not know any one codec, tables, packs or stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

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
    """Rows to records, row by row: a record depends on its row alone and its size on the field alone.

    A held row's record is what its decoded row encodes to, so that saving and resuming again and again moves no row.
    """

    name: str

    def record_bytes(self, field: Field) -> int:
        """Bytes of one record."""

    def encode(self, rows: np.ndarray, field: Field) -> Encoded:
        """``uint8 [n, field.row_bytes]`` to records; they may be the argument itself."""

    def decode(self, records: np.ndarray, field: Field) -> np.ndarray:
        """``uint8 [n, record_bytes]`` to ``[n, field.width]`` in the field's dtype, or float32 where numpy lacks it."""
