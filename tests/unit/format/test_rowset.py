"""Row sets: portable 64-bit roaring bitmaps, and no others."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap, BitMap64

from incremental_ckpt.errors import CorruptionError
from incremental_ckpt.format.rowset import decode_rows, encode_rows

KEY = "data/00000001-0123456789abcdef/rank-00000-0000.safetensors"
LIMIT = 2**62
IDS = st.one_of(
    st.sets(st.integers(0, 200), max_size=60),
    st.sets(st.integers(0, LIMIT - 1), max_size=20),
    st.sets(st.sampled_from([0, 1, 65535, 65536, 2**32 - 1, 2**32, 2**32 + 1, 2**40, LIMIT - 1])),
)


def ids_of(*rows: int) -> npt.NDArray[np.int64]:
    return np.array(sorted(rows), dtype=np.int64)


def bucket(key: int, bitmap: bytes) -> bytes:
    return struct.pack("<I", key) + bitmap


@settings(max_examples=80, deadline=None, database=None)
@given(IDS)
def test_ids_come_back_and_the_bytes_are_the_portable_bitmap(rows: set[int]) -> None:
    ids = ids_of(*rows)
    raw = encode_rows(ids)
    portable = BitMap64(sorted(rows))
    assert BitMap64.deserialize(raw) == portable
    decoded = decode_rows(raw, count=len(rows), rows=LIMIT, key=KEY)
    assert decoded.dtype == np.int64
    np.testing.assert_array_equal(decoded, ids)


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(0, dtype=np.int64),
        np.arange(300_000, dtype=np.int64),
        np.arange(0, 200_000, 2, dtype=np.int64),
        np.arange(0, 2**36, 2**20, dtype=np.int64),
        np.concatenate([np.arange(5000), np.arange(2**32 - 70_000, 2**32 + 70_000)]),
    ],
    ids=["none", "one run", "every other", "one a container", "across buckets"],
)
def test_every_kind_of_container_comes_back(ids: npt.NDArray[np.int64]) -> None:
    raw = encode_rows(ids)
    np.testing.assert_array_equal(decode_rows(memoryview(raw), count=len(ids), rows=2**36, key=KEY), ids)


def test_one_bucket_is_spelled_as_the_specification_says() -> None:
    # count of buckets, key; cookie without runs, containers; key and cardinality - 1; offset; the ids' low halves
    expected = struct.pack("<QI", 1, 0) + struct.pack("<II", 12346, 1) + struct.pack("<HHI", 1, 2, 16)
    assert encode_rows(ids_of(65539, 65541, 65600)) == expected + struct.pack("<HHH", 3, 5, 64)
    assert encode_rows(ids_of()) == struct.pack("<Q", 0)


@pytest.mark.parametrize(
    "ids",
    [
        np.array([1, 1], dtype=np.int64),
        np.array([2, 1], dtype=np.int64),
        np.array([-1, 1], dtype=np.int64),
        np.array([1, 2], dtype=np.int32),
        np.array([[1, 2]], dtype=np.int64),
    ],
    ids=["repeated", "descending", "negative", "int32", "matrix"],
)
def test_ids_that_are_no_ascending_set_are_refused(ids: npt.NDArray[np.int64]) -> None:
    with pytest.raises(ValueError, match="row ids must be"):
        encode_rows(ids)


@pytest.mark.parametrize(("count", "rows"), [(2, 10), (4, 10), (3, 9), (0, 10), (2**62, 10)])
def test_another_count_or_ids_beyond_the_shard_are_corrupt(count: int, rows: int) -> None:
    raw = encode_rows(ids_of(1, 5, 9))
    assert len(decode_rows(raw, count=3, rows=10, key=KEY)) == 3
    with pytest.raises(CorruptionError) as caught:
        decode_rows(raw, count=count, rows=rows, key=KEY)
    assert caught.value.key == KEY


def test_billions_of_ids_in_a_few_bytes_are_refused_before_they_are_unfolded() -> None:
    everything = BitMap()
    everything.add_range(0, 2**32)
    raw = struct.pack("<Q", 3) + b"".join(bucket(key, everything.serialize()) for key in range(3))
    assert len(raw) < 3 * 2**20
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match=str(3 * 2**32)):
            decode_rows(raw, count=1000, rows=2**40, key=KEY)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(raw)


ONE = BitMap([1]).serialize()
NONE = BitMap().serialize()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 2**63) + bucket(0, ONE),
        struct.pack("<Q", 2) + bucket(0, ONE),
        struct.pack("<Q", 1) + bucket(0, ONE) + b"\0",
        struct.pack("<Q", 0) + bucket(0, ONE),
        struct.pack("<Q", 2) + bucket(0, ONE) + bucket(0, ONE),
        struct.pack("<Q", 2) + bucket(1, ONE) + bucket(0, ONE),
        struct.pack("<Q", 2) + bucket(0, ONE) + bucket(1, NONE),
        struct.pack("<Q", 1) + bucket(0, struct.pack("<II", 12346, 2**31)),
        struct.pack("<Q", 1) + bucket(0, struct.pack("<I", 12345)),
        struct.pack("<Q", 1) + bucket(2**31, ONE),
        struct.pack("<Q", 1) + bucket(2**32 - 1, ONE),
    ],
)
def test_bytes_that_are_no_bitmap_of_one_id_are_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_rows(raw, count=1, rows=2**32, key=KEY)


@pytest.mark.parametrize("claimed", [4999, 9998, 10000, 65535])
def test_a_container_that_lies_about_its_cardinality_is_corrupt(claimed: int) -> None:
    raw = bytearray(encode_rows(np.arange(0, 20_000, 2, dtype=np.int64)))
    struct.pack_into("<H", raw, 8 + 4 + 8 + 2, claimed)
    with pytest.raises(CorruptionError):
        decode_rows(bytes(raw), count=claimed + 1, rows=2**20, key=KEY)


def test_an_unsorted_container_is_corrupt() -> None:
    raw = encode_rows(ids_of(1, 2, 3))[:-6] + struct.pack("<HHH", 3, 2, 1)
    with pytest.raises(CorruptionError):
        decode_rows(raw, count=3, rows=10, key=KEY)


@settings(max_examples=300, deadline=None, database=None)
@given(st.data())
def test_damaged_bytes_give_ids_in_bounds_or_corruption(data: st.DataObject) -> None:
    ids = np.unique(np.array(data.draw(st.lists(st.integers(0, 2**34), max_size=30)), dtype=np.int64))
    raw = bytearray(encode_rows(ids))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        decoded = decode_rows(bytes(raw), count=len(ids), rows=2**34 + 1, key=KEY)
    except CorruptionError:
        return
    assert len(decoded) == len(ids)
    assert (np.diff(decoded) > 0).all()
    assert decoded.size == 0 or (decoded[0] >= 0 and decoded[-1] <= 2**34)
