"""What every codec promises: records of fixed size that depend on their row alone, hold it within the stated bound or
say that they do not, and that the decoded row encodes to again."""

from __future__ import annotations

import numpy as np
import pytest
from codec_oracle import (
    CODECS,
    DTYPES,
    LOSSY,
    ROWWISE,
    decoded_rows,
    encoded,
    excess,
    field,
    of_any_bits,
    ordinary,
    table,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from incremental_ckpt.codecs import rowwise

widths = st.one_of(st.integers(1, 20), st.sampled_from([32, 63, 64, 100]))
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=20, deadline=None)
codecs = pytest.mark.parametrize("codec", LOSSY)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.mark.parametrize(
    ("codec", "size"), [("fp16", 128), ("bf16", 128), ("int8", 68), ("int4", 36), ("int3", 28), ("int2", 20)]
)
def test_a_record_of_64_elements_has_the_stated_size(codec: str, size: int) -> None:
    records, _ = encoded(codec, *table(ordinary(np.random.default_rng(0), 5, 64)))
    assert records.shape == (5, size)
    assert CODECS[codec].record_bytes(field(64)) == size


@codecs
@dtypes
@few
@given(seed=seeds, width=widths)
def test_held_rows_are_within_the_bound_and_encode_to_the_same_record_again(
    codec: str, dtype: str, seed: int, width: int
) -> None:
    rng, of = np.random.default_rng(seed), field(width, dtype)
    for rows in (table(ordinary(rng, 40, width), dtype)[0], of_any_bits(rng, 60, of)):
        records, held = encoded(codec, rows, of)
        assert excess(codec, rows[held], records[held], of).max(initial=0) <= 1
        again, held_again = encoded(codec, decoded_rows(codec, records[held], of), of)
        assert held_again.all()
        assert np.array_equal(again, records[held])


@codecs
def test_ordinary_rows_are_held(codec: str) -> None:
    for width in (4, 7, 64):
        for dtype in DTYPES:
            rows, of = table(ordinary(np.random.default_rng(1), 500, width), dtype)
            if CODECS[codec].record_bytes(of) >= of.row_bytes:
                continue
            assert encoded(codec, rows, of)[1].mean() > (0.95 if dtype in ("float16", "bfloat16") else 0.999)


@codecs
def test_a_record_depends_on_its_row_alone(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    for width in (5, 64):
        of = field(width)
        rows = np.concatenate([table(ordinary(rng, 200, width))[0], of_any_bits(rng, 100, of)])
        order = rng.permutation(300)
        records, held = encoded(codec, rows, of)
        shuffled, held_shuffled = encoded(codec, rows[order], of)
        assert np.array_equal(shuffled, records[order])
        assert np.array_equal(held_shuffled, held[order])
        monkeypatch.setattr(rowwise, "_BLOCK_BYTES", 7 * 4 * width)
        assert np.array_equal(encoded(codec, rows, of)[0], records)
        assert np.array_equal(np.concatenate([encoded(codec, r[None], of)[0] for r in rows[:20]]), records[:20])
        monkeypatch.undo()


@codecs
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_with_nan_or_infinity_are_not_held_and_leave_the_others_as_they_are(codec: str, bad: float) -> None:
    values = ordinary(np.random.default_rng(3), 40, 64)
    clean, _ = encoded(codec, *table(values))
    values[[0, 7, 39], [0, 13, 63]] = bad
    values[20] = bad
    records, held = encoded(codec, *table(values))
    assert np.flatnonzero(~held).tolist() == [0, 7, 20, 39]
    assert np.array_equal(records[held], clean[held])
    assert not records[~held].any()


@codecs
@dtypes
def test_denormals_are_held_within_the_bound_or_not_at_all(codec: str, dtype: str) -> None:
    tiny = {"float64": 2.0**-1060, "float32": 2.0**-140, "float16": 2.0**-20, "bfloat16": 2.0**-130}[dtype]
    rows, of = table(np.random.default_rng(4).uniform(-8, 8, (50, 64)) * tiny, dtype)
    assert rows.any()
    records, held = encoded(codec, rows, of)
    assert excess(codec, rows[held], records[held], of).max(initial=0) <= 1


@codecs
def test_zeros_are_exact(codec: str) -> None:
    rows, of = table(np.zeros((3, 64), np.float32))
    records, held = encoded(codec, rows, of)
    assert held.all()
    assert np.array_equal(decoded_rows(codec, records, of), rows)


@pytest.mark.parametrize("codec", ROWWISE)
@dtypes
def test_constant_rows_are_exact_down_to_denormals(codec: str, dtype: str) -> None:
    largest = 60000.0 if dtype == "float16" else 3e38
    constants = np.array([0.1, -7.3, largest, 1e-6, 3e-44, 1e-45])[:, None].repeat(9, axis=1)
    rows, of = table(constants.astype(np.float32), dtype)
    records, held = encoded(codec, rows, of)
    assert held.all()
    assert np.array_equal(decoded_rows(codec, records, of), rows)


@pytest.mark.parametrize("codec", ROWWISE)
def test_a_float64_constant_that_float32_lacks_is_not_held(codec: str) -> None:
    rows, of = table(np.array([[0.1] * 9, [0.5] * 9, [1e-300] * 9, [1e300] * 9]), "float64")
    assert encoded(codec, rows, of)[1].tolist() == [False, True, False, False]


@pytest.mark.parametrize("codec", ROWWISE)
def test_a_spread_of_a_fiftieth_of_the_mean_is_held_within_the_bound_and_one_of_a_thousandth_is_not_held(
    codec: str,
) -> None:
    spread = np.random.default_rng(5).uniform(-1, 1, (50, 64)).astype(np.float32)
    for mean, expected in ((50.0, True), (-50.0, True), (1000.0, False)):
        rows, of = table(spread + np.float32(mean))
        records, held = encoded(codec, rows, of)
        assert (held == expected).all()
        assert excess(codec, rows[held], records[held], of).max(initial=0) <= 1


def test_rows_beyond_fp16_are_held_by_all_but_fp16() -> None:
    rows, of = table(np.random.default_rng(6).standard_normal((50, 64)).astype(np.float32) * 1e6)
    held = {codec: bool(encoded(codec, rows, of)[1].any()) for codec in LOSSY}
    assert held == {codec: codec != "fp16" for codec in LOSSY}


@pytest.mark.parametrize("codec", ROWWISE)
def test_the_scale_of_a_row_does_not_matter(codec: str) -> None:
    """A table of 10 million rows begins within 3e-4, where a step in fp16 would have lost most of its digits."""
    values = ordinary(np.random.default_rng(7), 100, 64)
    here, _ = encoded(codec, *table(values))
    for exponent in (-60, -20, 12):
        there, held = encoded(codec, *table(np.ldexp(values, exponent)))
        assert held.all()
        assert np.array_equal(there[:, 4:], here[:, 4:])


@pytest.mark.parametrize("codec", ROWWISE)
@dtypes
def test_a_row_without_negative_elements_comes_back_without(codec: str, dtype: str) -> None:
    rows, of = table(np.random.default_rng(8).standard_normal((2000, 16)) ** 4 * 1e-3, dtype)
    records, held = encoded(codec, rows, of)
    assert held.mean() > 0.9
    assert CODECS[codec].decode(records, of).min() >= 0


@codecs
def test_rows_are_read_only_to_a_codec_and_need_be_neither_adjacent_nor_aligned(codec: str) -> None:
    rows, of = table(ordinary(np.random.default_rng(9), 30, 12))
    expected, _ = encoded(codec, rows, of)
    memory = np.zeros(rows.size * 2 + 1, np.uint8)
    apart = memory[1:].reshape(30, -1)[:, : of.row_bytes]
    apart[...] = rows
    apart.flags.writeable = False
    assert np.array_equal(encoded(codec, apart, of)[0], expected)
    wide = np.zeros((30, expected.shape[1] + 3), np.uint8)
    wide[:, 3:] = expected
    assert np.array_equal(CODECS[codec].decode(wide[:, 3:], of), CODECS[codec].decode(expected, of))


@codecs
def test_no_rows_give_no_records(codec: str) -> None:
    for width in (1, 64):
        of = field(width)
        records, held = encoded(codec, np.empty((0, of.row_bytes), np.uint8), of)
        assert records.shape == (0, CODECS[codec].record_bytes(of))
        assert CODECS[codec].decode(records, of).shape == (0, width)
        assert held.shape == (0,)


@codecs
def test_fifty_cycles_of_saving_resuming_and_training_move_no_row_but_those_trained(codec: str) -> None:
    rng = np.random.default_rng(10)
    rows, of = table(ordinary(rng, 300, 16))
    live = rows.copy()
    for _ in range(50):
        records, held = encoded(codec, live, of)
        restored = np.where(held[:, None], decoded_rows(codec, records, of), live)
        untouched = live[:200].copy()
        live = restored
        if _ > 0:
            assert np.array_equal(live[:200], untouched)
        trained = rng.integers(200, 300, 30)
        live[trained] = table(live[trained].view(np.float32) + rng.standard_normal((30, 16)).astype(np.float32) * 0.01)[
            0
        ]
    records, held = encoded(codec, rows, of)
    assert held[:200].all()
    assert np.array_equal(live[:200], decoded_rows(codec, records, of)[:200])
    assert excess(codec, rows[:200], records[:200], of).max() <= 1
