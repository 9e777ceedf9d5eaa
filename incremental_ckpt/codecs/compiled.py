"""Encodes rows by the span of each and decodes records with the loops of _span.c, where installing could compile them.

It must not know fields or how else rows are encoded: rowwise.py does the same, to the same bits, without it.
"""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import numpy.typing as npt

from incremental_ckpt.codecs.bits import payload_bytes
from incremental_ckpt.codecs.values import Float32s

HEADER_BYTES = 4


class SpanLoop:
    """
    Args:
        library: built from _span.c.

    Raises:
        AttributeError: it was built from something else, which an older _span.c is too.
    """

    ENCODED_BITS = (8, 4)
    DECODED_BITS = (8, 4, 3, 2)

    def __init__(self, library: ctypes.CDLL) -> None:
        self._encode, self._decode = library.encode_spans, library.decode_records
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._encode.argtypes = [pointer, size, size, ctypes.c_uint, pointer, pointer]
        self._decode.argtypes = [pointer, size, size, ctypes.c_uint, pointer]
        self._encode.restype = self._decode.restype = None

    def encode(self, values: Float32s, bits: int, records: npt.NDArray[np.uint8], held: npt.NDArray[np.bool_]) -> None:
        """Fill in records and which of them hold their rows; the others become zero bytes.

        Args:
            values: float32 ``[n, width]``.
            bits: of a code, one of ``ENCODED_BITS``.
            records: ``uint8 [n, header and codes]``.
            held: ``bool [n]``.

        Raises:
            ValueError: an array of another shape or dtype, with gaps, or that cannot be written to.
        """
        count, width = values.shape
        _check_codes(width, bits, self.ENCODED_BITS)
        _check("values", values, np.float32, (count, width))
        _check("records", records, np.uint8, (count, HEADER_BYTES + payload_bytes(width, bits)), written=True)
        _check("held", held, np.bool_, (count,), written=True)
        self._encode(values.ctypes.data, count, width, bits, records.ctypes.data, held.ctypes.data)

    def decode(self, records: npt.NDArray[np.uint8], bits: int, values: Float32s) -> None:
        """Fill in values, whatever bytes the records have.

        Args:
            records: ``uint8 [n, header and codes]``.
            bits: of a code, one of ``DECODED_BITS``.
            values: float32 ``[n, width]``.

        Raises:
            ValueError: an array of another shape or dtype, with gaps, or that cannot be written to.
        """
        count, width = values.shape
        _check_codes(width, bits, self.DECODED_BITS)
        _check("records", records, np.uint8, (count, HEADER_BYTES + payload_bytes(width, bits)))
        _check("values", values, np.float32, (count, width), written=True)
        self._decode(records.ctypes.data, count, width, bits, values.ctypes.data)


def _check_codes(width: int, bits: int, known: tuple[int, ...]) -> None:
    if bits not in known or not width:
        raise ValueError(f"rows of {width} elements and codes of {bits} bits; the loop takes {known} bits")


def _check(what: str, array: np.ndarray, dtype: type, shape: tuple[int, ...], *, written: bool = False) -> None:
    """The loop reads and writes by address: nothing else keeps it off memory that is not the array's."""
    flags = array.flags
    addressable = flags.c_contiguous and flags.aligned and (flags.writeable or not written)
    if array.dtype != np.dtype(dtype) or array.shape != shape or not addressable:
        raise ValueError(
            f"{what} must be {np.dtype(dtype)} {list(shape)}, C-contiguous, aligned{', writeable' if written else ''}; "
            f"got {array.dtype} {list(array.shape)}, strides {list(array.strides)}, writeable: {flags.writeable}"
        )


def span_loop(directory: Path = Path(__file__).parent) -> SpanLoop | None:
    """Built for this Python beside this module. None: there is no such file, or the machine is big-endian."""
    built = directory / f"_span{EXTENSION_SUFFIXES[0]}"
    if sys.byteorder != "little" or not built.is_file():
        return None
    try:
        return SpanLoop(ctypes.CDLL(str(built)))
    except (OSError, AttributeError):  # for another machine, or from an older source: numpy does the same
        return None


SPAN_LOOP = span_loop()
