"""The compiled loop writes the records that numpy writes and nothing beside them; where it is not, numpy serves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash._xxhash
from codec_oracle import field, rows_of_all_kinds, table
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from span_builds import BUILT, PROJECT, build

from incremental_ckpt.codecs import compiled, encode_values
from incremental_ckpt.codecs.bits import payload_bytes
from incremental_ckpt.codecs.compiled import SpanLoop, span_loop
from incremental_ckpt.codecs.grid import GridSearch
from incremental_ckpt.codecs.rowwise import INT8, RowwiseCodec, rowwise_codec

SEARCHES = {bits: GridSearch(bits, shrinks=(), rounds=0) for bits in SpanLoop.ENCODED_BITS}
BY_NUMPY = {bits: RowwiseCodec("by numpy", search) for bits, search in SEARCHES.items()}
LARGEST = float(np.finfo(np.float32).max)
DENORMAL = 2.0**-149
GUARD = 0xA5
bits_of_a_code = pytest.mark.parametrize("bits", SpanLoop.ENCODED_BITS)


def by_loop(loop: SpanLoop, values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    records = np.full((len(values), 4 + payload_bytes(values.shape[1], bits)), GUARD, np.uint8)
    held = np.ones(len(values), np.bool_)
    loop.encode(values, bits, records, held)
    return records, held


def by_numpy(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    found = BY_NUMPY[bits].encode(values.view(np.uint8), field(values.shape[1]))
    return found.records, np.ones(len(values), np.bool_) if found.held is None else found.held


def assert_same(loop: SpanLoop, values: np.ndarray, bits: int) -> None:
    (records, held), (expected, expected_held) = by_loop(loop, values, bits), by_numpy(values, bits)
    assert np.array_equal(held, expected_held)
    assert held.view(np.uint8).max(initial=0) <= 1
    assert np.array_equal(records, expected)


def extremes(rng: np.random.Generator, width: int) -> np.ndarray:
    """Rows at the ends of what float32 and a record can hold, and one number in rows that are otherwise equal."""
    special = np.array(
        [0.0, -0.0, 1.0, -1.0, np.nan, -np.nan, np.inf, -np.inf, LARGEST, -LARGEST, DENORMAL, -DENORMAL, 2.0**-126,
         2.0**-96, 255 * 2.0**-96, 15 * 2.0**-96, 2.0**32, 255 * 2.0**32, 15 * 2.0**32, 65504.0, 65520.0], np.float32
    )  # fmt: skip
    mixed = rng.choice(special, (200, width))
    pairs = np.where(rng.random((200, width)) < 0.5, rng.choice(special, (200, 1)), rng.choice(special, (200, 1)))
    equal = np.repeat(rng.choice(special, (60, 1)), width, axis=1)
    lone = equal.copy()
    lone[np.arange(60), rng.integers(0, width, 60)] = rng.choice(special, 60)
    denormals = (rng.integers(-300, 300, (60, width)) * DENORMAL).astype(np.float32)
    near_least = (rng.uniform(-1, 1, (60, width)) * 2.0 ** rng.uniform(-98, -86, (60, 1))).astype(np.float32)
    near_most = (rng.uniform(-1, 1, (60, width)) * 2.0 ** rng.uniform(33, 42, (60, 1))).astype(np.float32)
    return np.concatenate([mixed, pairs, equal, lone, denormals, near_least, near_most])


@bits_of_a_code
def test_the_loop_writes_numpys_records_at_every_width(loop: SpanLoop, bits: int) -> None:
    for width in range(1, 131):
        assert_same(loop, rows_of_all_kinds(width, width, "float32")[0].view(np.float32), bits)
        assert_same(loop, extremes(np.random.default_rng(width), width), bits)


@bits_of_a_code
@pytest.mark.parametrize("width", [255, 256, 257, 511, 512, 513, 2000])
def test_the_loop_writes_numpys_records_of_wide_rows(loop: SpanLoop, bits: int, width: int) -> None:
    assert_same(loop, rows_of_all_kinds(width, width, "float32")[0].view(np.float32), bits)
    assert_same(loop, extremes(np.random.default_rng(width), width), bits)


@bits_of_a_code
def test_the_loop_writes_numpys_records_of_a_table(loop: SpanLoop, bits: int) -> None:
    rng = np.random.default_rng(bits)
    values = rng.standard_normal((200_000, 24), np.float32)
    assert_same(loop, values, bits)
    values *= np.exp2(rng.uniform(-30, 30, (200_000, 1))).astype(np.float32)
    values += (rng.uniform(-70, 70, (200_000, 1)) * np.ptp(values, axis=1, keepdims=True)).astype(np.float32)
    assert_same(loop, values, bits)


@bits_of_a_code
@settings(max_examples=100, deadline=None)
@given(
    values=st.tuples(st.integers(0, 40), st.integers(1, 70)).flatmap(
        lambda shape: arrays(np.float32, shape, elements=st.floats(width=32), fill=st.floats(width=32))
    )
)
def test_the_loop_writes_numpys_records_of_whatever_is_found(loop: SpanLoop, bits: int, values: np.ndarray) -> None:
    assert_same(loop, values, bits)


@bits_of_a_code
@pytest.mark.parametrize("width", [1, 2, 3, 7, 16, 31, 33, 64, 127, 257])
def test_the_loop_reads_and_writes_nothing_beside_its_arrays(loop: SpanLoop, bits: int, width: int) -> None:
    for count in (0, 1, 15, 16, 17, 33):
        size = 4 + payload_bytes(width, bits)
        around = np.full((count + 4) * width, np.nan, np.float32)
        values = around[2 * width : (count + 2) * width].reshape(count, width)
        values[...] = np.random.default_rng(count).standard_normal((count, width))
        of_records, of_held = np.full(count * size + 256, GUARD, np.uint8), np.full(count + 256, GUARD, np.uint8)
        records = of_records[128 : 128 + count * size].reshape(count, size)
        held = of_held[128 : 128 + count].view(np.bool_)
        before = values.copy()
        loop.encode(values, bits, records, held)
        for array, stop in ((of_records, 128 + count * size), (of_held, 128 + count)):
            assert (array[:128] == GUARD).all()
            assert (array[stop:] == GUARD).all()
        assert np.array_equal(values, before)
        expected, expected_held = by_numpy(before, bits)
        assert np.array_equal(records, expected)
        assert np.array_equal(held, expected_held)


def test_arrays_that_the_loop_cannot_address_are_refused(loop: SpanLoop) -> None:
    values, records, held = np.ones((6, 8), np.float32), np.zeros((6, 12), np.uint8), np.zeros(6, np.bool_)
    frozen = records.copy()
    frozen.flags.writeable = False
    unaligned = np.zeros(6 * 8 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(6, 8)
    wrong = [
        (values.astype(np.float64), 8, records, held),
        (values.astype(">f4"), 8, records, held),
        (values[:, ::2], 8, np.zeros((6, 8), np.uint8), held),
        (unaligned, 8, records, held),
        (values[:, :0], 8, np.zeros((6, 4), np.uint8), held),
        (values, 8, records[:5], held),
        (values, 8, records[:, :11], held),
        (values, 8, np.zeros((6, 24), np.uint8)[:, ::2], held),
        (values, 8, records.view(np.int8), held),
        (values, 8, frozen, held),
        (values, 4, records, held),
        (values, 3, np.zeros((6, 7), np.uint8), held),
        (values, 8, records, held[:5]),
        (values, 8, records, held.view(np.uint8)),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"values|records|held|bits"):
            loop.encode(*arguments)


@bits_of_a_code
def test_rows_at_odd_addresses_and_rows_with_gaps_have_the_same_records(loop: SpanLoop, bits: int) -> None:
    codec = RowwiseCodec("by loop", SEARCHES[bits], loop)
    rows, of = table(np.random.default_rng(0).standard_normal((50, 24)).astype(np.float32))
    odd = np.concatenate([np.zeros(1, np.uint8), rows.reshape(-1)])[1:].reshape(rows.shape)
    gaps = np.repeat(rows, 2, axis=0)[::2]
    for other in (odd, gaps, rows[:0]):
        assert np.array_equal(codec.encode(other, of).records, BY_NUMPY[bits].encode(rows, of).records[: len(other)])


def test_a_save_has_the_same_bytes_with_and_without_the_loop(loop: SpanLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, of = rows_of_all_kinds(3, 48, "float32")
    monkeypatch.setattr(INT8, "_encode_loop", loop)
    name, with_loop = encode_values(rows, "int8", of)
    monkeypatch.setattr(INT8, "_encode_loop", None)
    other_name, without = encode_values(rows, "int8", of)
    assert name == other_name == "int8"
    assert np.array_equal(with_loop.records, without.records)
    assert np.array_equal(with_loop.held, without.held)  # type: ignore[arg-type]


def test_the_loops_touch_no_byte_beside_their_arrays(loop_folder: Path) -> None:
    program = Path(__file__).with_name("fenced_arrays.py")
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    subprocess.run([sys.executable, program, loop_folder], check=True, env=environment)


class Refusing(SpanLoop):
    def __init__(self) -> None:
        pass

    def encode(self, *_: object) -> None:
        raise AssertionError("asked")

    def decode(self, records: np.ndarray, bits: int, values: np.ndarray) -> None:
        values[...] = BY_NUMPY[bits].decode(records, field(values.shape[1]))


def test_int8_asks_the_loop_for_float32_rows_only_and_searches_never_do() -> None:
    values = np.random.default_rng(0).standard_normal((40, 64))
    asking = RowwiseCodec("int8", SEARCHES[8], Refusing())
    with pytest.raises(AssertionError, match="asked"):
        asking.encode(*table(values, "float32"))
    for dtype in ("float64", "float16", "bfloat16"):
        asking.encode(*table(values, dtype))
    rowwise_codec(4, Refusing()).encode(*table(values))
    RowwiseCodec("int3", GridSearch(3, shrinks=(), rounds=0), Refusing()).encode(*table(values))


def test_there_is_no_loop_where_no_file_was_built_or_the_file_is_none(tmp_path: Path) -> None:
    assert span_loop(tmp_path) is None
    (tmp_path / "_span.so").write_bytes(b"of no Python")
    assert span_loop(tmp_path) is None
    (tmp_path / BUILT).write_bytes(b"cut short")
    assert span_loop(tmp_path) is None


def test_there_is_no_loop_where_the_file_lacks_the_function(tmp_path: Path) -> None:
    shutil.copy(xxhash._xxhash.__file__, tmp_path / BUILT)
    assert span_loop(tmp_path) is None


@pytest.mark.parametrize("function", ["encode_spans", "decode_records"])
def test_there_is_no_loop_where_the_file_is_of_a_source_that_had_one_of_the_functions_only(
    tmp_path: Path, function: str
) -> None:
    older = tmp_path / "older.c"
    older.write_text(f"void {function}(void) {{}}")
    build(tmp_path, older)
    assert span_loop(tmp_path) is None


def test_there_is_no_loop_on_big_endian_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.SpanLoop, "__init__", lambda self, library: None)
    monkeypatch.setattr(compiled.ctypes, "CDLL", lambda path: None)
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    assert span_loop() is not None
    monkeypatch.setattr(sys, "byteorder", "big")
    assert span_loop() is None
