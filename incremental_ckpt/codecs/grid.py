"""The grid of a row: a step and an offset, of 16 bits each, whose levels lie close to the row's elements.

It must not know records or packing. Where a better grid than the row's span is sought, all rows of a block are searched
side by side: elements lie in the first axis, rows in the second, so that what belongs to a row is a vector beside a
matrix and no loop runs over rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from incremental_ckpt.codecs.values import Float32s, in_dtype

_LEAST_STEP = 31 << 23
"""The bits of 2^-96, which step code 0 would stand for; it marks constant rows instead."""
_STEP_SHIFT = 14
_MOST_STEP = 0xFFFF
_MOST_OFFSET = 0x7FFF
_LEAST_WIDTH_BY_ROWS = 32
"""Below, what numpy spends on each row outweighs laying the rows side by side."""
_ZERO = np.float32(0)
_HALF = np.float32(0.5)

_Ints = npt.NDArray[np.int32]
_Mask = npt.NDArray[np.bool_]


def step_of(codes: npt.NDArray[np.uint16]) -> Float32s:
    """Distance of two levels."""
    return ((codes.astype(np.uint32) << _STEP_SHIFT) + np.uint32(_LEAST_STEP)).view(np.float32)


def offset_of(codes: npt.NDArray[np.int16], bits: int) -> Float32s:
    """The lowest level, in steps."""
    return codes.astype(np.float32) * offset_unit(bits)


def offset_unit(bits: int) -> np.float32:
    return np.float32(2.0 ** (bits - 9))


@dataclass(frozen=True)
class Fit:
    """The chosen grids of n rows.

    Attributes:
        step_codes, offset_codes: ``uint16 [n]`` and ``int16 [n]``.
        held: ``bool [n]``: the row has such a grid, and its ends take the lowest and the highest code.
        constant: ``bool [n]``: all elements are equal and finite.
    """

    step_codes: npt.NDArray[np.uint16]
    offset_codes: npt.NDArray[np.int16]
    held: _Mask
    constant: _Mask


@dataclass
class _Grid:
    """Per row: step, its reciprocal, offset in steps, and their codes before they are cut to 16 bits."""

    step: Float32s
    per_step: Float32s
    offset: Float32s
    step_codes: _Ints
    offset_codes: Float32s

    def places(self, lowest: Float32s, highest: Float32s) -> tuple[Float32s, Float32s]:
        """Where elements lie on the grid, in steps from its lowest level."""
        return lowest * self.per_step - self.offset, highest * self.per_step - self.offset

    def fit(self, held: _Mask, constant: _Mask) -> Fit:
        return Fit(self.step_codes.astype(np.uint16), self.offset_codes.astype(np.int16), held, constant)


class GridSearch:
    """Finds a grid per row.

    The first candidate spans lowest to highest element. Where there are shrinks or rounds, a second one is sought: of
    the grids that lie up to half a step inside at either end the one with the least squared error, then alternately
    codes by grid and grid by least squares. It is taken where its squared error, with step and offset as they are
    stored, is lower. A row that lies on a grid already therefore keeps it.

    Args:
        bits: of a code, 2 to 8.
        shrinks: what to cut off either end of the span before the search, in steps, at most a half.
        rounds: of least squares.

    Attributes:
        of_span: nothing is sought: of float32 and float64 rows the grid is the one that spans them.
    """

    def __init__(self, bits: int, *, shrinks: tuple[float, ...], rounds: int) -> None:
        self.bits = bits
        self._highest = np.float32((1 << bits) - 1)
        self._unit = offset_unit(bits)
        self._starts = tuple(product(shrinks, repeat=2))
        self._rounds = rounds
        self.of_span = rounds == 0

    def fit(self, values: Float32s, dtype: str, codes: npt.NDArray[np.uint8], memory: Memory) -> Fit:
        """Choose grids and fill in codes.

        Args:
            values: ``[n, width]``.
            dtype: the field's, in which decoded rows will be kept.
            codes: ``[n, width]``, rows without gaps.
            memory: for one block at a time.
        """
        # A row of 16-bit elements off its grid by rounding finds it again by least squares, not by its two ends.
        rounds = max(self._rounds, 2) if dtype in ("float16", "bfloat16") else self._rounds
        if rounds or values.shape[1] < _LEAST_WIDTH_BY_ROWS:
            return self._fit_side_by_side(values, dtype, codes, memory, rounds)
        return self._fit_span(values, codes, memory)

    def _fit_span(self, values: Float32s, codes: npt.NDArray[np.uint8], memory: Memory) -> Fit:
        # _span.c does the same in the same order: whoever changes one changes the other.
        values = np.ascontiguousarray(values)
        lowest, highest = _ends(values)
        grid, span = self._spanning(lowest, highest)
        first, last = grid.places(lowest, highest)
        places = memory.floats[0, : values.size].reshape(values.shape)
        np.multiply(values, grid.per_step[:, None], out=places)
        places -= grid.offset[:, None]
        np.rint(places, out=places)
        # The lowest is half a unit of the offset from 0 at most. The highest may round to Q + 1, but hardly ever does.
        if (last >= self._highest + _HALF).any():
            np.clip(places, _ZERO, self._highest, out=places)
        np.copyto(codes, places, casting="unsafe")
        return grid.fit(self._usable(grid, first, last), span == 0)

    def _fit_side_by_side(
        self, values: Float32s, dtype: str, codes: npt.NDArray[np.uint8], memory: Memory, rounds: int
    ) -> Fit:
        block = _Block(values, memory)
        lowest, highest = block.fold(np.minimum, block.elements), block.fold(np.maximum, block.elements)
        grid, span = self._spanning(lowest, highest)
        held = self._usable(grid, *grid.places(lowest, highest))
        chosen = block.scratch(0)
        self._codes(block, grid, chosen)
        if rounds:
            per_span = self._highest / span
            step, base = self._search(block, lowest, per_span, rounds)
            base = lowest + base / per_span
            # A row of squares must not come back with a negative element.
            base = np.where((lowest >= 0) & (base < 0), _ZERO, base)
            other = self._grid(step / per_span, base)
            codes_of_other = block.scratch(1)
            self._codes(block, other, codes_of_other)
            better = self._usable(other, *other.places(lowest, highest)) & (
                self._error(block, other, codes_of_other, per_span, dtype)
                < self._error(block, grid, chosen, per_span, dtype)
            )
            np.copyto(grid.step_codes, other.step_codes, where=better)
            np.copyto(grid.offset_codes, other.offset_codes, where=better)
            np.copyto(chosen, codes_of_other, where=block.spread(better))
        block.to_rows(chosen, codes)
        return grid.fit(held, span == 0)

    def _spanning(self, lowest: Float32s, highest: Float32s) -> tuple[_Grid, Float32s]:
        """The grid from lowest to highest element, and their distance."""
        span = highest - lowest
        return self._grid(span / self._highest, lowest), span

    def _grid(self, step: Float32s, base: Float32s) -> _Grid:
        """The storable grid nearest to one with this step and this lowest level."""
        bits = step.view(np.int32) + np.int32(1 << (_STEP_SHIFT - 1))
        step_codes = (bits - np.int32(_LEAST_STEP)) >> _STEP_SHIFT
        step = ((bits >> _STEP_SHIFT) << _STEP_SHIFT).view(np.float32)
        offset_codes = np.rint(base / (step * self._unit))
        return _Grid(step, 1 / step, offset_codes * self._unit, step_codes, offset_codes)

    def _usable(self, grid: _Grid, first: Float32s, last: Float32s) -> _Mask:
        """Both ends of the codes are used: the grid can be told from the decoded row, so encoding that again gives the
        same record. False where anything is NaN.

        Args:
            first, last: the places of the row's lowest and highest element.
        """
        usable: _Mask = grid.step_codes > 0
        usable &= grid.step_codes <= _MOST_STEP
        usable &= np.abs(grid.offset_codes) <= _MOST_OFFSET
        usable &= first <= _HALF
        usable &= last > self._highest - _HALF
        return usable

    def _codes(self, block: _Block, grid: _Grid, out: Float32s) -> None:
        np.multiply(block.elements, block.spread(grid.per_step), out=out)
        out -= block.spread(grid.offset)
        self._rounded(out)

    def _rounded(self, codes: Float32s) -> None:
        np.rint(codes, out=codes)
        np.clip(codes, _ZERO, self._highest, out=codes)

    def _error(self, block: _Block, grid: _Grid, codes: Float32s, per_span: Float32s, dtype: str) -> Float32s:
        """The squared error of the decoded rows, in units of the span's step."""
        off = block.scratch(2)
        np.add(codes, block.spread(grid.offset), out=off)
        off *= block.spread(grid.step)
        if dtype in ("float16", "bfloat16"):
            off[...] = in_dtype(off, dtype)
        off -= block.elements
        off *= block.spread(per_span)
        off *= off
        return block.fold(np.add, off)

    def _search(self, block: _Block, lowest: Float32s, per_span: Float32s, rounds: int) -> tuple[Float32s, Float32s]:
        """Step and lowest level of a better grid, in the steps of the span and from the lowest element."""
        places, codes, product_ = (block.scratch(i) for i in (1, 2, 3))
        np.subtract(block.elements, block.spread(lowest), out=places)
        places *= block.spread(per_span)
        step, base = self._best_start(block, places)
        width = np.float32(block.width)
        sum_places = block.fold(np.add, places)
        for _ in range(rounds):
            per_step = 1 / step
            np.multiply(places, block.spread(per_step), out=codes)
            codes -= block.spread(base * per_step)
            self._rounded(codes)
            sum_codes = block.fold(np.add, codes)
            sum_both = block.fold(np.add, np.multiply(codes, places, out=product_))
            sum_squares = block.fold(np.add, np.multiply(codes, codes, out=product_))
            step = (width * sum_both - sum_codes * sum_places) / (width * sum_squares - sum_codes * sum_codes)
            base = (sum_places - step * sum_codes) / width
        return step, base

    def _best_start(self, block: _Block, places: Float32s) -> tuple[Float32s, Float32s]:
        scaled, off = block.scratch(2), block.scratch(3)
        step, base = np.ones(block.count, np.float32), np.zeros(block.count, np.float32)
        least: Float32s | None = None
        for low, high in self._starts:
            shrunk = (self._highest - np.float32(low + high)) / self._highest
            np.multiply(places, 1 / shrunk, out=scaled)
            if low:
                scaled -= np.float32(low) / shrunk
            np.rint(scaled, out=off)
            off -= scaled
            off *= off
            error = block.fold(np.add, off) * (shrunk * shrunk)
            if least is None:
                least = error
                continue
            better = error < least
            np.copyto(step, shrunk, where=better)
            np.copyto(base, np.float32(low), where=better)
            np.minimum(least, error, out=least)
        return step, base


def _ends(values: Float32s) -> tuple[Float32s, Float32s]:
    """Lowest and highest element of each row; one of them is NaN where the row has a NaN.

    The bits of floats sort like integers but for the sign: as signed ones, positive numbers come last and ascend; as
    unsigned ones, negative numbers come last and descend. Integers fold at twice the speed of floats.
    """
    count, width = values.shape
    starts = np.arange(0, count * width, width)
    signed, unsigned = values.reshape(-1).view(np.int32), values.reshape(-1).view(np.uint32)
    highest = np.maximum.reduceat(signed, starts)
    lowest = np.maximum.reduceat(unsigned, starts).view(np.int32)
    one_sign = (highest ^ lowest) >= 0
    if one_sign.any():
        nearest_zero = np.minimum.reduceat(unsigned, starts).view(np.int32)
        np.copyto(lowest, nearest_zero, where=one_sign & (nearest_zero >= 0))
        np.copyto(highest, nearest_zero, where=one_sign & (nearest_zero < 0))
    return lowest.view(np.float32), highest.view(np.float32)


class Memory:
    """Reused from block to block, so that no page is faulted in twice.

    Args:
        elements: of the largest block.
    """

    def __init__(self, elements: int) -> None:
        self.floats = np.empty((5, elements), dtype=np.float32)
        self.bytes = np.empty((2, elements), dtype=np.uint8)

    def codes(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        return self.bytes[1, : math.prod(shape)].reshape(shape)


class _Block:
    """Rows side by side. Where the width allows, four neighbouring elements of a row stay neighbours, since copying
    16 bytes costs as much as copying 4.

    Attributes:
        elements: ``[width / lanes, n x lanes]``.
    """

    def __init__(self, values: Float32s, memory: Memory) -> None:
        self.count, self.width = values.shape
        self._lanes = 4 if self.width % 4 == 0 else 1
        self._memory = memory
        self.elements = self.scratch(4)
        values = np.ascontiguousarray(values)
        if self._lanes == 4:
            np.copyto(self.elements.view(np.complex128), values.view(np.complex128).T)
        else:
            np.copyto(self.elements, values.T)

    def scratch(self, number: int) -> Float32s:
        return self._shaped(self._memory.floats[number])

    def _shaped(self, flat: np.ndarray) -> np.ndarray:
        return flat[: self.count * self.width].reshape(self.width // self._lanes, self.count * self._lanes)

    def spread(self, per_row: np.ndarray) -> np.ndarray:
        """A number per row beside each of its elements."""
        return np.repeat(per_row, self._lanes) if self._lanes > 1 else per_row

    def fold(self, operation: np.ufunc, elements: Float32s) -> Float32s:
        """One number per row, by a fixed order of operations: it depends on the row alone."""
        # A single column is contiguous, and numpy sums that in another order.
        lone = elements.shape[1] == 1
        folded: Float32s = operation.accumulate(elements)[-1] if lone else operation.reduce(elements)
        if self._lanes == 1:
            return folded
        lanes = folded.reshape(self.count, 4)
        both: Float32s = operation(operation(lanes[:, 0], lanes[:, 1]), operation(lanes[:, 2], lanes[:, 3]))
        return both

    def to_rows(self, codes: Float32s, out: npt.NDArray[np.uint8]) -> None:
        small = self._shaped(self._memory.bytes[0])
        np.copyto(small, codes, casting="unsafe")
        if self._lanes == 4:
            np.copyto(out.view(np.uint32), small.view(np.uint32).T)
        else:
            np.copyto(out, small.T)
