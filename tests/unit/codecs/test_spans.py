"""The grid that spans a row, found row by row or with all rows side by side: both ways give the same records."""

from __future__ import annotations

import numpy as np
import pytest
from codec_oracle import ordinary, rows_of_all_kinds
from hypothesis import given, settings
from hypothesis import strategies as st

from incremental_ckpt.codecs import grid
from incremental_ckpt.codecs.grid import GridSearch, Memory, _Block, _ends
from incremental_ckpt.codecs.rowwise import RowwiseCodec

SPANNING = {bits: RowwiseCodec("spanning", GridSearch(bits, shrinks=(), rounds=0)) for bits in (8, 4, 3, 2)}
widths = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 63, 64, 100]))
seeds = st.integers(0, 2**32 - 1)
bits_of_a_code = pytest.mark.parametrize("bits", SPANNING)


@bits_of_a_code
@settings(max_examples=20, deadline=None)
@given(seed=seeds, width=widths, dtype=st.sampled_from(["float32", "float64"]))
def test_rows_one_by_one_give_the_records_of_rows_side_by_side(bits: int, seed: int, width: int, dtype: str) -> None:
    rows, of = rows_of_all_kinds(seed, width, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "_LEAST_WIDTH_BY_ROWS", 1)
        one_by_one = SPANNING[bits].encode(rows, of)
        patch.setattr(grid, "_LEAST_WIDTH_BY_ROWS", width + 1)
        side_by_side = SPANNING[bits].encode(rows, of)
    assert np.array_equal(one_by_one.records, side_by_side.records)
    assert (one_by_one.held is None) == (side_by_side.held is None)
    assert one_by_one.held is None or np.array_equal(one_by_one.held, side_by_side.held)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, width=widths)
def test_the_ends_of_a_row_are_its_lowest_and_its_highest_element_and_nan_where_it_has_one(
    seed: int, width: int
) -> None:
    rows, _ = rows_of_all_kinds(seed, width, "float32")
    values = rows.view(np.float32)
    lowest, highest = _ends(values)
    whole = ~np.isnan(values).any(axis=1)
    assert np.array_equal(lowest[whole], values[whole].min(axis=1))
    assert np.array_equal(highest[whole], values[whole].max(axis=1))
    assert (np.isnan(lowest) | np.isnan(highest))[~whole].all()


@pytest.mark.parametrize("width", [9, 63, 64])
def test_the_sum_of_a_row_is_the_same_whether_rows_lie_beside_it_or_not(width: int) -> None:
    values = ordinary(np.random.default_rng(0), 50, width)

    def sums(of: np.ndarray) -> np.ndarray:
        block = _Block(of, Memory(of.size))
        return block.fold(np.add, block.elements)

    together = sums(values)
    assert np.array_equal(np.concatenate([sums(row[None]) for row in values]), together)
    assert np.array_equal(np.concatenate([sums(values[i : i + 2]) for i in range(0, 50, 2)]), together)


def test_an_element_nearer_to_the_level_above_the_last_takes_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    grid_of = GridSearch._grid

    def lower_grid_of(self: GridSearch, step: np.ndarray, base: np.ndarray) -> object:
        found = grid_of(self, step, base)
        found.offset -= np.float32(1)
        return found

    monkeypatch.setattr(GridSearch, "_grid", lower_grid_of)
    values = ordinary(np.random.default_rng(1), 100, 64)
    codes = np.zeros(values.shape, np.uint8)
    with np.errstate(all="ignore"):
        GridSearch(8, shrinks=(), rounds=0).fit(values, "float32", codes, Memory(values.size))
    assert (codes[np.arange(100), values.argmax(axis=1)] == 255).all()
