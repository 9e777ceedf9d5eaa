"""The compiled loop reads from any record, valid or not, the row that numpy reads, and writes nothing beside it."""

from __future__ import annotations

import numpy as np
import pytest
from codec_oracle import BITS, CODECS, DTYPES, field, read_record, rows_of_all_kinds, table
from hypothesis import given, settings
from hypothesis import strategies as st

from incremental_ckpt.codecs.bits import payload_bytes
from incremental_ckpt.codecs.compiled import SPAN_LOOP, SpanLoop
from incremental_ckpt.codecs.rowwise import INT2, INT3, INT4, INT8, rowwise_codec
from incremental_ckpt.errors import FormatError

BY_NUMPY = {bits: rowwise_codec(bits, None) for bits in SpanLoop.DECODED_BITS}
GUARD = 0xA5
bits_of_a_code = pytest.mark.parametrize("bits", SpanLoop.DECODED_BITS)


def record_size(width: int, bits: int) -> int:
    return 4 + payload_bytes(width, bits)


def by_loop(loop: SpanLoop, records: np.ndarray, bits: int, width: int) -> np.ndarray:
    values = np.full((len(records), width), np.nan, np.float32)
    loop.decode(records, bits, values)
    return values


def assert_same(loop: SpanLoop, records: np.ndarray, bits: int, width: int) -> None:
    found, expected = by_loop(loop, records, bits, width), BY_NUMPY[bits].decode(records, field(width))
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def any_records(rng: np.random.Generator, count: int, width: int, bits: int) -> np.ndarray:
    """Bytes that nobody chose. A third says that its row is constant, and some have all codes at either end."""
    records = rng.integers(0, 256, (count, record_size(width, bits)), dtype=np.uint8)
    records[::3, :2] = 0
    records[::7, 4:] = 0
    records[1::7, 4:] = 255
    return records


@bits_of_a_code
def test_the_loop_reads_numpys_rows_at_every_width(loop: SpanLoop, bits: int) -> None:
    for width in (*range(1, 131), 255, 256, 257, 511, 512, 513, 2000):
        assert_same(loop, any_records(np.random.default_rng(width), 100, width, bits), bits, width)


@bits_of_a_code
def test_the_loop_reads_numpys_rows_from_records_that_numpy_wrote(loop: SpanLoop, bits: int) -> None:
    for width in (1, 2, 3, 5, 8, 24, 63, 64):
        rows, of = rows_of_all_kinds(width, width, "float32")
        assert_same(loop, BY_NUMPY[bits].encode(rows, of).records, bits, width)


@bits_of_a_code
@pytest.mark.parametrize("width", [1, 5, 40])
def test_the_loop_knows_every_step_and_every_offset(loop: SpanLoop, bits: int, width: int) -> None:
    every = np.arange(1 << 16, dtype="<u2")[:, None].view(np.uint8)
    for place in (slice(0, 2), slice(2, 4)):
        records = np.random.default_rng(width).integers(0, 256, (1 << 16, record_size(width, bits)), dtype=np.uint8)
        records[:, place] = every
        assert_same(loop, records, bits, width)


@bits_of_a_code
def test_the_loop_knows_every_code_at_every_place(loop: SpanLoop, bits: int) -> None:
    for width in (8, 9, 31, 260):
        codes = np.arange(256, dtype=np.uint8)[:, None].repeat(payload_bytes(width, bits), axis=1)
        header = np.array([40000, 0xFFF7], "<u2").view(np.uint8)[None].repeat(256, axis=0)
        assert_same(loop, np.concatenate([header, codes], axis=1), bits, width)


@bits_of_a_code
@settings(max_examples=100, deadline=None)
@given(draw=st.data(), width=st.integers(1, 70), count=st.integers(0, 20))
def test_the_loop_reads_numpys_rows_from_whatever_is_found(
    loop: SpanLoop, bits: int, draw: st.DataObject, width: int, count: int
) -> None:
    size = record_size(width, bits)
    found = draw.draw(st.binary(min_size=count * size, max_size=count * size))
    assert_same(loop, np.frombuffer(found, np.uint8).reshape(count, size), bits, width)


@pytest.mark.parametrize("codec", BITS)
@settings(max_examples=100, deadline=None)
@given(draw=st.data(), width=st.integers(1, 20))
def test_records_of_any_bytes_are_read_as_the_page_says(codec: str, draw: st.DataObject, width: int) -> None:
    size = record_size(width, BITS[codec])
    record = draw.draw(st.binary(min_size=size, max_size=size))
    expected = np.array([read_record(codec, record, width)], np.float32)
    for reader in (CODECS[codec], BY_NUMPY[BITS[codec]]):
        found = reader.decode(np.frombuffer(record, np.uint8)[None], field(width))
        assert np.array_equal(found, expected, equal_nan=True)


@bits_of_a_code
def test_a_constant_of_any_bits_is_kept(loop: SpanLoop, bits: int) -> None:
    constants = np.array([0, 1, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF], "<u4")
    for width in (1, 3, 8, 33):
        records = np.full((len(constants), record_size(width, bits)), 0xFF, np.uint8)
        records[:, :2] = 0
        if records.shape[1] < 6:
            assert_same(loop, records, bits, width)
            continue
        records[:, 2:6] = constants[:, None].view(np.uint8)
        found = by_loop(loop, records, bits, width).view(np.uint32)
        assert np.array_equal(found, constants[:, None].repeat(width, axis=1))


@bits_of_a_code
@pytest.mark.parametrize("width", [1, 2, 3, 7, 16, 31, 33, 64, 127, 257])
def test_the_loop_writes_nothing_beside_its_array(loop: SpanLoop, bits: int, width: int) -> None:
    for count in (0, 1, 15, 16, 17, 33):
        around = np.full((count * width + 64) * 4, GUARD, np.uint8)
        values = around[128 : 128 + count * width * 4].view(np.float32).reshape(count, width)
        records = any_records(np.random.default_rng(count), count, width, bits)
        before = records.copy()
        loop.decode(records, bits, values)
        assert (around[:128] == GUARD).all()
        assert (around[128 + count * width * 4 :] == GUARD).all()
        assert np.array_equal(records, before)
        expected = BY_NUMPY[bits].decode(before, field(width))
        assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_arrays_that_the_loop_cannot_address_are_refused(loop: SpanLoop) -> None:
    records, values = np.zeros((6, 12), np.uint8), np.ones((6, 8), np.float32)
    frozen = values.copy()
    frozen.flags.writeable = False
    unaligned = np.zeros(6 * 8 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(6, 8)
    wrong = [
        (records[:5], 8, values),
        (records[:, :11], 8, values),
        (np.zeros((6, 24), np.uint8)[:, ::2], 8, values),
        (records.view(np.int8), 8, values),
        (records[0], 8, values),
        (records, 4, values),
        (np.zeros((6, 9), np.uint8), 5, values),
        (records, 8, values.astype(np.float64)),
        (records, 8, values.astype(">f4")),
        (records, 8, np.ones((6, 16), np.float32)[:, ::2]),
        (records, 8, unaligned),
        (records, 8, frozen),
        (np.zeros((6, 4), np.uint8), 8, values[:, :0]),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"values|records|bits"):
            loop.decode(*arguments)
    assert (values == 1).all()


@bits_of_a_code
def test_records_with_gaps_at_odd_addresses_or_not_to_be_written_to_are_read_alike(loop: SpanLoop, bits: int) -> None:
    codec, of = rowwise_codec(bits, loop), field(24)
    records = any_records(np.random.default_rng(0), 50, 24, bits)
    odd = np.concatenate([np.zeros(1, np.uint8), records.reshape(-1)])[1:].reshape(records.shape)
    odd.flags.writeable = False
    gaps = np.repeat(records, 2, axis=1)[:, ::2]
    for other in (odd, gaps, records[::-1][::-1], records[:0]):
        found, expected = codec.decode(other, of), BY_NUMPY[bits].decode(records, of)[: len(other)]
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@bits_of_a_code
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_field_of_every_dtype_is_encoded_and_decoded_alike_with_and_without_the_loop(
    loop: SpanLoop, bits: int, dtype: str
) -> None:
    with_loop = rowwise_codec(bits, loop)
    for width in (3, 48):
        rows, of = rows_of_all_kinds(width, width, dtype)
        found, expected = with_loop.encode(rows, of), BY_NUMPY[bits].encode(rows, of)
        assert np.array_equal(found.records, expected.records)
        assert (found.held is None) == (expected.held is None)
        assert found.held is None or np.array_equal(found.held, expected.held)
        decoded, by_numpy = with_loop.decode(found.records, of), BY_NUMPY[bits].decode(found.records, of)
        assert decoded.dtype == by_numpy.dtype
        assert np.array_equal(decoded.view(np.uint8), by_numpy.view(np.uint8))


@bits_of_a_code
def test_tables_of_several_blocks_are_decoded_alike(loop: SpanLoop, bits: int) -> None:
    records, of = any_records(np.random.default_rng(1), 20_000, 24, bits), field(24)
    found, expected = rowwise_codec(bits, loop).decode(records, of), BY_NUMPY[bits].decode(records, of)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


class Refusing(SpanLoop):
    def __init__(self) -> None:
        pass

    def decode(self, *_: object) -> None:
        raise AssertionError("asked")


@pytest.mark.parametrize("dtype", DTYPES)
@bits_of_a_code
def test_codecs_ask_the_loop_to_decode_whatever_the_dtype(bits: int, dtype: str) -> None:
    rows, of = table(np.random.default_rng(0).standard_normal((40, 64)), dtype)
    records = BY_NUMPY[bits].encode(rows, of).records
    with pytest.raises(AssertionError, match="asked"):
        rowwise_codec(bits, Refusing()).decode(records, of)


def test_the_codecs_have_the_loop_that_was_installed() -> None:
    assert [codec._decode_loop for codec in (INT8, INT4, INT3, INT2)] == [SPAN_LOOP] * 4
    assert [codec._encode_loop for codec in (INT8, INT4, INT3, INT2)] == [SPAN_LOOP, None, None, None]


@bits_of_a_code
@pytest.mark.parametrize("by", ["loop", "numpy"])
def test_records_of_another_size_are_refused(loop: SpanLoop, bits: int, by: str) -> None:
    codec, of = rowwise_codec(bits, loop if by == "loop" else None), field(24)
    size = codec.record_bytes(of)
    for wrong in (size - 1, size + 1, 4, 1):
        with pytest.raises(FormatError, match=f"have {size} bytes, not {wrong}"):
            codec.decode(np.zeros((3, wrong), np.uint8), of)
