"""Row-wise asymmetric quantization: a step, an offset and one small code per element (docs/codecs.md).

It must not know rows from each other, tables or packs; how a grid is found for a row is grid.py's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from incremental_ckpt.codecs.base import Encoded
from incremental_ckpt.codecs.bits import pack, payload_bytes, unpack
from incremental_ckpt.codecs.compiled import HEADER_BYTES, SPAN_LOOP, SpanLoop
from incremental_ckpt.codecs.grid import GridSearch, Memory, offset_of, step_of
from incremental_ckpt.codecs.values import UNIT_ROUNDOFF, Float32s, float32_of, in_dtype, numbers_of
from incremental_ckpt.errors import FormatError
from incremental_ckpt.model import Field

_BLOCK_BYTES = 1 << 20
_CONSTANT = slice(2, 6)
_MOST_SETTLING = 4
_Mask = npt.NDArray[np.bool_]


class RowwiseCodec:
    """
    Args:
        search: finds the grid of each row; its bits are the codec's.
        loop: decodes, and encodes rows of float32 whose grid is the one that spans them; records and rows are the same
            without it.
    """

    def __init__(self, name: str, search: GridSearch, loop: SpanLoop | None = None) -> None:
        self.name = name
        self._search = search
        self._bits = search.bits
        self._encode_loop = loop if search.of_span and search.bits in SpanLoop.ENCODED_BITS else None
        self._decode_loop = loop if search.bits in SpanLoop.DECODED_BITS else None

    def record_bytes(self, field: Field) -> int:
        return HEADER_BYTES + payload_bytes(field.width, self._bits)

    def encode(self, rows: np.ndarray, field: Field) -> Encoded:
        records = np.empty((len(rows), self.record_bytes(field)), dtype=np.uint8)
        held = np.empty(len(rows), dtype=np.bool_)
        if self._encode_loop is not None and field.dtype == "float32" and len(rows):
            self._encode_loop.encode(np.require(numbers_of(rows, field), requirements="A"), self._bits, records, held)
            return Encoded.of(records, held)
        step = max(1, _BLOCK_BYTES // (4 * field.width))
        memory = Memory(min(step, len(rows)) * field.width)
        with np.errstate(all="ignore"):
            for start in range(0, len(rows), step):
                block = slice(start, start + step)
                held[block] = self._encode_block(rows[block], field, records[block], memory)
        return Encoded.of(records, held)

    def decode(self, records: np.ndarray, field: Field) -> np.ndarray:
        """Raises FormatError for records of another size than the field's."""
        if records.shape[1] != self.record_bytes(field):
            raise FormatError(
                f"{self.name} records of {field} have {self.record_bytes(field)} bytes, not {records.shape[1]}: what "
                "wrote them does not follow docs/codecs.md"
            )
        values = np.empty((len(records), field.width), dtype=in_dtype(np.empty(0, np.float32), field.dtype).dtype)
        step = max(1, _BLOCK_BYTES // (4 * field.width))
        float32s = None if field.dtype == "float32" else np.empty((min(step, len(records)), field.width), np.float32)
        for start in range(0, len(records), step):
            block = slice(start, start + step)
            part = records[block]
            if float32s is None:
                self._decode_block(part, values[block])
            else:
                values[block] = in_dtype(self._decode_block(part, float32s[: len(part)]), field.dtype)
        return values

    def _encode_block(self, rows: np.ndarray, field: Field, records: np.ndarray, memory: Memory) -> _Mask:
        values = float32_of(rows, field)
        held = self._quantize(values, field, records, memory)
        if field.dtype in ("float16", "bfloat16"):
            self._settle(values, field, records, held, memory)
        if field.dtype == "float64":
            constant = np.flatnonzero(held & ~records[:, :2].any(axis=1))
            held[constant] = (numbers_of(rows[constant], field) == values[constant]).all(axis=1)
        if not held.all():
            records[~held] = 0
        return held

    def _quantize(self, values: Float32s, field: Field, records: np.ndarray, memory: Memory) -> _Mask:
        """Fill in records; return which of them hold their rows."""
        payload = records[:, HEADER_BYTES:]
        codes = payload if self._bits == 8 else memory.codes(values.shape)
        fit = self._search.fit(values, field.dtype, codes, memory)
        if self._bits < 8:
            pack(codes, self._bits, payload)
        header = records[:, :HEADER_BYTES].view("<u2")
        header[:, 0] = fit.step_codes
        header[:, 1] = fit.offset_codes.view(np.uint16)
        held = fit.held
        constant = np.flatnonzero(fit.constant)
        if records.shape[1] >= _CONSTANT.stop:
            records[constant] = 0
            records[constant, _CONSTANT] = values[constant, :1].astype("<f4").view(np.uint8)
            held[constant] = True
        return held

    def _settle(self, values: Float32s, field: Field, records: np.ndarray, held: _Mask, memory: Memory) -> None:
        """Go on to a record that its own decoded row encodes to: rounding to 16 bits moves a row off its grid."""
        left = np.flatnonzero(held)
        for _ in range(_MOST_SETTLING):
            if not left.size:
                break
            again = np.empty((len(left), records.shape[1]), dtype=np.uint8)
            held[left] = self._quantize(self._kept(records[left], field), field, again, memory)
            same = (again == records[left]).all(axis=1)
            records[left] = again
            left = left[held[left] & ~same]
        held[left] = False
        off = np.abs(values - self._kept(records, field))
        lowest, highest = values.min(axis=1, initial=np.inf), values.max(axis=1, initial=-np.inf)
        largest = np.maximum(np.abs(lowest), np.abs(highest))
        step = (highest - lowest) / np.float32((1 << self._bits) - 1)
        bound = np.float32(0.51) * step + np.float32(2 * UNIT_ROUNDOFF[field.dtype]) * largest
        held &= np.sqrt((off * off).mean(axis=1)) <= bound

    def _kept(self, records: np.ndarray, field: Field) -> Float32s:
        """What a table of the field's dtype has after a restore, as float32."""
        values = self._decode_block(records, np.empty((len(records), field.width), np.float32))
        kept: Float32s = in_dtype(values, field.dtype).astype(np.float32)
        return kept

    def _decode_block(self, records: np.ndarray, into: Float32s) -> Float32s:
        # _span.c does the same in the same order: whoever changes one changes the other.
        if self._decode_loop is not None:
            self._decode_loop.decode(np.ascontiguousarray(records), self._bits, into)
            return into
        header = np.ascontiguousarray(records[:, :HEADER_BYTES]).view("<u2")
        into[...] = unpack(records[:, HEADER_BYTES:], self._bits, into.shape[1])
        into += offset_of(header[:, 1].view("<i2"), self._bits)[:, None]
        into *= step_of(header[:, 0])[:, None]
        constant = np.flatnonzero(header[:, 0] == 0)
        if constant.size and records.shape[1] >= _CONSTANT.stop:
            into[constant] = np.ascontiguousarray(records[constant, _CONSTANT]).view("<f4")
        return into


def rowwise_codec(bits: int, loop: SpanLoop | None = SPAN_LOOP) -> RowwiseCodec:
    """The codec ``int{bits}``. Below 8 bits steps are large, and a better grid than the row's span is sought."""
    shrinks, rounds = ((), 0) if bits == 8 else ((0.0, 0.25, 0.5), 2)
    return RowwiseCodec(f"int{bits}", GridSearch(bits, shrinks=shrinks, rounds=rounds), loop)


INT8, INT4, INT3, INT2 = (rowwise_codec(bits) for bits in (8, 4, 3, 2))
