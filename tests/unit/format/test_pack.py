"""Packs: plain safetensors files, with every byte under a checksum and headers that are not believed."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from incremental_ckpt.errors import CorruptionError
from incremental_ckpt.format import pack as packs
from incremental_ckpt.format.pack import FinishedPack, PackBuilder, checksum, read_header
from incremental_ckpt.model import DTYPE_BYTES

KEY = "data/00000001-0123456789abcdef/rank-00000-0000.safetensors"
NUMPY_DTYPES = sorted(set(DTYPE_BYTES) - {"bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"})


def object_of(finished: FinishedPack) -> bytes:
    return b"".join(finished.parts)


def build(*tensors: tuple[str, str, tuple[int, ...], list[Any]]) -> FinishedPack:
    builder = PackBuilder()
    for index, (name, dtype, shape, parts) in enumerate(tensors):
        assert builder.add(name, dtype, shape, parts) == index
    return builder.finish(KEY, 3)


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(NUMPY_DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**32 - 1)),
        max_size=6,
    )
)
def test_safetensors_reads_what_is_built(drawn: list[tuple[str, list[int], int]]) -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    builder = PackBuilder()
    for index, (dtype, shape, seed) in enumerate(drawn):
        raw = np.random.default_rng(seed).integers(0, 2, (*shape, DTYPE_BYTES[dtype]), dtype=np.uint8)
        arrays[f"{index}.ä"] = raw.view(dtype).reshape(shape)
        whole = memoryview(raw.tobytes())
        cut = seed % (len(whole) + 1)
        builder.add(f"{index}.ä", dtype, shape, [whole[:cut], whole[cut:]])
    finished = builder.finish(KEY, 0)
    raw_object = object_of(finished)
    assert len(raw_object) == finished.pack.size == finished.pack.header_size + builder.nbytes
    loaded = safetensors.numpy.load(raw_object)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)
    header = read_header(raw_object[: finished.pack.header_size], KEY, len(raw_object))
    assert {name: (dtype, shape) for name, (dtype, shape, _, _) in header.items()} == {
        name: (array.dtype.name, array.shape) for name, array in arrays.items()
    }
    for (name, (_, _, begin, end)), span in zip(header.items(), finished.spans, strict=True):
        assert (span.tensor, span.begin, span.end) == (name, begin, end)
        assert raw_object[begin:end] == arrays[name].tobytes()


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_of_the_format_fits_into_a_safetensors_file(dtype: str) -> None:
    size = DTYPE_BYTES[dtype]
    finished = build(("t", dtype, (2, 3), [bytes(6 * size)]))
    ((_, stored),) = safetensors.deserialize(object_of(finished))
    assert bytes(stored["data"]) == bytes(6 * size)
    assert stored["shape"] == ([2, 3, size] if dtype.startswith("complex") else [2, 3])
    ((name, (read, _, _, _)),) = read_header(finished.parts[0], KEY, finished.pack.size).items()
    assert (name, read) == ("t", "uint8" if dtype.startswith("complex") else dtype)


def test_data_begin_at_a_multiple_of_64_bytes() -> None:
    for length in range(1, 130):
        finished = build(("n" * length, "uint8", (3,), [b"abc"]))
        assert finished.pack.header_size % 64 == 0
        assert finished.pack.header_size == 8 + struct.unpack_from("<Q", finished.parts[0])[0]
        assert finished.spans[0].begin == finished.pack.header_size


def test_buffers_are_neither_copied_nor_changed() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    flat, whole = b"0123", memoryview(rows)
    finished = build(("a", "uint8", (4,), [flat]), ("b", "float32", (3, 4), [whole]))
    assert finished.parts[1] is flat
    assert np.shares_memory(np.frombuffer(finished.parts[2], dtype=np.float32), rows)
    assert [len(part) for part in finished.parts[1:]] == [4, 48]


def test_empty_buffers_of_any_shape_are_tensors_of_no_bytes() -> None:
    finished = build(("a", "float32", (0, 4), [np.zeros((0, 4), np.float32).data]), ("b", "uint8", (1,), [b"b"]))
    assert [span.size for span in finished.spans] == [0, 1]
    assert safetensors.numpy.load(object_of(finished))["a"].shape == (0, 4)


def test_spans_carry_the_pack_and_the_checksum_over_all_parts() -> None:
    finished = build(("a", "uint8", (6,), [b"abc", bytearray(b""), bytearray(b"def")]), ("b", "uint8", (0,), []))
    assert [span.pack for span in finished.spans] == [3, 3]
    assert finished.spans[0].checksum == xxhash.xxh3_64_hexdigest(b"abcdef") == checksum(memoryview(b"abcdef"))
    assert finished.spans[1].checksum == xxhash.xxh3_64_hexdigest(b"")
    assert finished.spans[1].size == 0
    header = finished.parts[0]
    assert (finished.pack.key, finished.pack.header_checksum) == (KEY, xxhash.xxh3_64_hexdigest(header))


def test_a_checksum_has_16_digits_and_takes_buffers_as_they_are() -> None:
    array = np.arange(100, dtype=np.int64)
    assert checksum(array.data) == checksum(array.tobytes()) == checksum(memoryview(array).cast("B"))
    assert any(checksum(bytes([n])).startswith("0") for n in range(64))
    assert {len(checksum(bytes([n]))) for n in range(64)} == {16}
    with pytest.raises((BufferError, ValueError)):
        checksum(array[::2].data)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "part"),
    [
        ("", "uint8", (1,), b"1"),
        ("taken", "uint8", (1,), b"1"),
        ("__metadata__", "uint8", (1,), b"1"),
        ("t", "float4", (1,), b"1"),
        ("t", "float32", (1,), b"1"),
        ("t", "uint8", (-1, -1), b"1"),
        ("t", "uint8", (2,), np.zeros((2, 2), np.uint8)[:, 0].data),
    ],
)
def test_a_tensor_that_no_reader_could_read_is_refused(
    name: str, dtype: str, shape: tuple[int, ...], part: Any
) -> None:
    builder = PackBuilder()
    builder.add("taken", "uint8", (1,), [b"1"])
    with pytest.raises(ValueError):
        builder.add(name, dtype, shape, [part])
    assert builder.nbytes == 1


def test_a_header_too_long_for_safetensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "MAX_HEADER", 100)
    with pytest.raises(ValueError, match="header"):
        build(("n" * 100, "uint8", (1,), [b"1"]))


def pack_with(header: object, data: int, length: int | None = None) -> tuple[bytes, int]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw = struct.pack("<Q", len(text) if length is None else length) + text
    return raw, 8 + len(text) + data


def tensor(begin: object, end: object, shape: object = None, dtype: object = "U8") -> dict[str, object]:
    sizes = [end - begin] if shape is None and isinstance(begin, int) and isinstance(end, int) else shape
    return {"dtype": dtype, "shape": sizes, "data_offsets": [begin, end]}


LIES: list[tuple[object, int, int | None]] = [
    ({"a": tensor(0, 4)}, 4, 2**63),
    ({"a": tensor(0, 4)}, 4, 2**64 - 1),
    ({"a": tensor(0, 4)}, 4, 1000),
    ({"a": tensor(0, 4)}, 4, 3),
    ({"a": tensor(0, 4)}, 4, 0),
    ({"a": tensor(0, 4)}, 5, None),
    ({"a": tensor(0, 4)}, 3, None),
    ({"a": tensor(1, 4)}, 4, None),
    ({"a": tensor(0, 4), "b": tensor(3, 8)}, 8, None),
    ({"a": tensor(0, 4), "b": tensor(5, 8)}, 8, None),
    ({"a": tensor(0, 4), "b": tensor(0, 4)}, 4, None),
    ({"a": tensor(4, 0, [4])}, 4, None),
    ({"a": tensor(-4, 0)}, 4, None),
    ({"a": tensor(0, 2**70)}, 4, None),
    ({"a": tensor(0, 4, [2**32, 2**32, 2**32, 0])}, 4, None),
    ({"a": tensor(0, 4, [5])}, 4, None),
    ({"a": tensor(0, 4, [4.0])}, 4, None),
    ({"a": tensor(0, 4, [1] * 40 + [4])}, 4, None),
    ({"a": tensor(0, 4, "4")}, 4, None),
    ({"a": tensor(0, 4, [1], "F32") | {"data_offsets": [0]}}, 4, None),
    ({"a": tensor(0, 4, [1], "F33")}, 4, None),
    ({"a": tensor(0, 4, [1], ["F32"])}, 4, None),
    ({"a": {"dtype": "U8", "shape": [4]}}, 4, None),
    ({"a": None}, 0, None),
    ([], 0, None),
    (
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        4,
        None,
    ),
    (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, None),
    (b'{"a":NaN}', 0, None),
    (b"{", 0, None),
    (b"\xff\xfe", 0, None),
    (b"", 0, None),
]


@pytest.mark.parametrize(("header", "data", "length"), LIES, ids=range(len(LIES)))
def test_a_header_that_lies_is_corrupt(header: object, data: int, length: int | None) -> None:
    raw, size = pack_with(header, data, length)
    with pytest.raises(CorruptionError) as caught:
        read_header(raw, KEY, size)
    assert caught.value.key == KEY


def test_a_header_is_read_from_the_beginning_alone_or_from_more() -> None:
    raw, size = pack_with({"b": tensor(4, 8), "__metadata__": {"by": "x"}, "a": tensor(0, 4, [2], "F16")}, 8)
    expected = {"b": ("uint8", (4,), size - 4, size), "a": ("float16", (2,), size - 8, size - 4)}
    assert read_header(raw, KEY, size) == expected
    assert read_header(memoryview(raw + bytes(8)), KEY, size) == expected
    for length in (0, 7, 8, len(raw) - 1):
        with pytest.raises(CorruptionError):
            read_header(raw[:length], KEY, size)


def test_a_pack_without_tensors_is_a_safetensors_file_too() -> None:
    finished = PackBuilder().finish(KEY, 0)
    assert finished.pack.size == finished.pack.header_size == 64
    assert safetensors.numpy.load(object_of(finished)) == {}
    assert read_header(finished.parts[0], KEY, 64) == {}
