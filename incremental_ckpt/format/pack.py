"""Packs: safetensors files built from buffers that are not copied, and their headers (docs/format.md, section 7).

It must not know what the tensors mean to a checkpoint.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from incremental_ckpt.errors import CorruptionError
from incremental_ckpt.format.members import MAX_INT, MalformedError, Members, integer
from incremental_ckpt.format.rank_facts import MAX_DIMENSIONS, Pack, Span
from incremental_ckpt.format.sealed import parse_json
from incremental_ckpt.model import DTYPE_BYTES

Buffer = bytes | bytearray | memoryview

ALIGNMENT = 64
MAX_HEADER = 100_000_000
"""Bytes of JSON; safetensors refuses longer headers."""

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class FinishedPack:
    """A pack as facts and as bytes.

    Attributes:
        parts: the object's bytes: the header, then the buffers given to ``add``.
        spans: where each tensor lies, in order of ``add``.
    """

    pack: Pack
    parts: list[Buffer]
    spans: list[Span]


class PackBuilder:
    """Collects the tensors of one pack. Buffers are kept, not copied: leave them alone until the pack is written."""

    def __init__(self) -> None:
        self._header: dict[str, dict[str, object]] = {}
        self._tensors: list[tuple[str, int, int, str]] = []
        self._parts: list[Buffer] = []
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of data so far, without the header."""
        return self._nbytes

    def add(self, name: str, dtype: str, shape: Sequence[int], parts: Sequence[Buffer]) -> int:
        """Append a tensor (little-endian, C order) whose bytes are the concatenation of ``parts``; return its index.

        Raises:
            ValueError: a name that is taken, an unknown dtype, a buffer that is not contiguous, or a number of bytes
                that dtype and shape do not have.
        """
        if not name or name == _METADATA or name in self._header:
            raise ValueError(f"a pack cannot have a tensor of the name {name!r}: it is taken, reserved or empty")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {name} has the unknown dtype {dtype}")
        flat = [_flat(part) for part in parts]
        size = sum(memoryview(part).nbytes for part in flat)
        if any(length < 0 for length in shape) or size != math.prod(shape) * DTYPE_BYTES[dtype]:
            raise ValueError(f"tensor {name} has {size} bytes, which do not make {dtype} of shape {list(shape)}")
        # safetensors lacks complex dtypes: their bytes, with a dimension of the element's size.
        code, stored = (CODES[dtype], list(shape)) if dtype in CODES else ("U8", [*shape, DTYPE_BYTES[dtype]])
        begin, end = self._nbytes, self._nbytes + size
        self._header[name] = {"dtype": code, "shape": stored, "data_offsets": [begin, end]}
        self._tensors.append((name, begin, end, _checksum(flat)))
        self._parts += flat
        self._nbytes = end
        return len(self._tensors) - 1

    def finish(self, key: str, pack_index: int) -> FinishedPack:
        """The pack as the object ``key``, the ``pack_index``-th of its rank manifest.

        Raises:
            ValueError: more tensors than a safetensors header has room for.
        """
        header = json.dumps(self._header, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-(_LENGTH.size + len(header)) % ALIGNMENT)
        if len(header) > MAX_HEADER:
            raise ValueError(f"{key} cannot be a pack: a header of {len(header)} bytes exceeds {MAX_HEADER}")
        header = _LENGTH.pack(len(header)) + header
        pack = Pack(key, len(header) + self._nbytes, len(header), checksum(header))
        spans = [
            Span(pack_index, name, len(header) + begin, len(header) + end, digest)
            for name, begin, end, digest in self._tensors
        ]
        return FinishedPack(pack, [header, *self._parts], spans)


def checksum(buffer: Buffer) -> str:
    """The xxh3-64 of a contiguous buffer, 16 hex digits. The buffer is not copied, and the GIL is released."""
    return _checksum([buffer])


def read_header(
    raw: bytes | memoryview, key: str, object_size: int
) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """The tensors of a pack by name: dtype, shape, begin and end in the object.

    Args:
        raw: the object's beginning, at least its whole header.
        object_size: bytes of the whole object, all of which its tensors must fill.

    Raises:
        CorruptionError: not the header of a pack of that size.
    """
    try:
        return _read_header(memoryview(raw).cast("B"), object_size)
    except ValueError as error:
        raise CorruptionError(
            f"{key} is damaged: it has no valid header ({error}). "
            "Restore the object from a copy, or resume from an ancestor",
            key=key,
            found=str(error),
        ) from error


def _read_header(raw: memoryview, object_size: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    if raw.nbytes < _LENGTH.size:
        raise MalformedError(f"{raw.nbytes} bytes are too short for a header")
    (length,) = _LENGTH.unpack_from(raw)
    data = _LENGTH.size + length
    if length > MAX_HEADER or data > raw.nbytes or data > object_size:
        raise MalformedError(f"it claims {length} bytes, and {raw.nbytes} bytes were read of {object_size}")
    members = parse_json(bytes(raw[_LENGTH.size : data]))
    members.pop(_METADATA, None)
    tensors = {name: _tensor(Members(tensor, name), data) for name, tensor in members.items()}
    filled = data
    for begin, end, name in sorted((begin, end, name) for name, (_, _, begin, end) in tensors.items()):
        if begin != filled:
            raise MalformedError(f"tensor {name} begins at {begin} instead of {filled}: a hole or an overlap")
        filled = end
    if filled != object_size:
        raise MalformedError(f"its tensors end at {filled}, and the object has {object_size} bytes")
    return tensors


def _tensor(members: Members, data: int) -> tuple[str, tuple[int, ...], int, int]:
    dtype = _DTYPES.get(members.text("dtype"))
    if dtype is None:
        raise MalformedError(f"{members.place('dtype')} is unknown")
    shape = tuple(integer(length, members.place("shape")) for length in members.items("shape"))
    offsets = [integer(offset, members.place("data_offsets")) for offset in members.items("data_offsets")]
    if len(shape) > MAX_DIMENSIONS or math.prod(length for length in shape if length) > MAX_INT:
        raise MalformedError(f"{members.place('shape')} is larger than any memory")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise MalformedError(f"{members.place('data_offsets')} do not fit dtype and shape")
    return dtype, shape, data + offsets[0], data + offsets[1]


def _flat(part: Buffer) -> Buffer:
    """The buffer itself if it is one of bytes, else a view of its bytes: stores write what ``len`` counts."""
    if isinstance(part, (bytes, bytearray)):
        return part
    view = memoryview(part)
    if not view.c_contiguous:
        raise ValueError("a buffer is not contiguous: copy it in C order first")
    if view.nbytes == 0:
        return b""
    return part if view.ndim == 1 and view.format == "B" and part is view else view.cast("B")


def _checksum(parts: Sequence[Buffer]) -> str:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()
