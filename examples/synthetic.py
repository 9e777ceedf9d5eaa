"""Generates a synthetic Criteo file (Kaggle's TSV layout) from published cardinalities and fitted popularity curves.

Rows come from a seed alone, chunk by chunk; it knows nothing of how the file is read or trained on.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from criteo import INTEGERS, ColumnFit, column_fits

Array = npt.NDArray[Any]

_CHUNK_ROWS = 1 << 15
_HEAD_RANKS = 1 << 16
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_INTEGER_DIGITS = 5
# The integer features are not fitted: plausible medians (as log1p) and shares of empty cells.
_INTEGER_LOG_MEDIANS = np.array([0.8, 1.2, 2.0, 1.8, 7.0, 3.2, 1.6, 2.0, 3.6, 0.4, 1.0, 0.3, 1.8])
_INTEGER_MISSING = np.array([0.45, 0.0, 0.21, 0.21, 0.03, 0.22, 0.04, 0.0, 0.04, 0.45, 0.04, 0.76, 0.21])
_CLICK_BIAS = -2.2
_CLICK_WEIGHT = 0.25


class _Popularity:
    """Draws ranks 1, 2, … of one column: rank 1 with its measured share, the others with p(rank) ~ (rank + q)^-s."""

    def __init__(self, fit: ColumnFit) -> None:
        self._s, self._q = fit.s, fit.q
        self._head = min(fit.ranks, _HEAD_RANKS)
        weights = (np.arange(1, self._head + 1) + fit.q) ** -fit.s
        tail = self._integral(fit.ranks + 0.5) if fit.ranks > self._head else 0.0
        shares = np.concatenate((weights[1:], [tail]))
        shares *= (1 - fit.top1) / shares.sum()
        self._tail_share = shares[-1]
        self._tail_integral = tail
        self._cumulative = np.cumsum(np.concatenate(([fit.top1], shares[:-1])))
        self._last = fit.ranks
        head_shares = np.concatenate(([fit.top1], shares[:-1]))
        # An empty cell is a value like others: it takes the rank that is as frequent.
        self.missing_rank = int(np.abs(head_shares - fit.missing).argmin()) + 1 if fit.missing else 0

    def _integral(self, rank: float) -> float:
        """Of (x + q)^-s from the end of the head to rank."""
        power = 1 - self._s
        return float(((rank + self._q) ** power - (self._head + 0.5 + self._q) ** power) / power)

    def ranks(self, uniform: Array) -> Array:
        ranks = np.searchsorted(self._cumulative, uniform, side="right") + 1
        if not self._tail_share:
            return np.minimum(ranks, self._head)
        in_tail = ranks > self._head
        share = (uniform[in_tail] - self._cumulative[-1]) / self._tail_share
        power = 1 - self._s
        base = (self._head + 0.5 + self._q) ** power
        tail = (base + np.clip(share, 0, 1) * self._tail_integral * power) ** (1 / power) - self._q
        ranks[in_tail] = np.clip(np.rint(tail), self._head + 1, self._last).astype(np.int64)
        return ranks


def generate_rows(rows: int, seed: int) -> Iterator[bytes]:
    """The file's text in pieces of whole lines; a longer file begins with the shorter one of the same seed."""
    columns = [_Popularity(fit) for fit in column_fits()]
    for chunk, start in enumerate(range(0, rows, _CHUNK_ROWS)):
        random = np.random.Generator(np.random.PCG64([seed, chunk]))
        yield _chunk_text(columns, random)[: rows - start].tobytes().replace(b"\0", b"")


def write_file(path: Path, rows: int, seed: int) -> None:
    """The file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        file.writelines(generate_rows(rows, seed))
    unfinished.replace(path)


def _chunk_text(columns: list[_Popularity], random: np.random.Generator) -> Array:
    """uint8 [rows, width]: lines in which every cell has its greatest width, unused places being 0."""
    ranks = np.stack([c.ranks(random.random(_CHUNK_ROWS)) for c in columns])
    salts = (np.arange(len(columns), dtype=np.uint32) * np.uint32(0x9E3779B9))[:, None]
    hashes = _mix(ranks.astype(np.uint32) ^ _mix(salts))
    effects = _mix(hashes ^ np.uint32(0x5BD1E995)) / 2**32 - 0.5
    logits = _CLICK_BIAS + _CLICK_WEIGHT * np.sqrt(12) * effects.sum(axis=0)
    labels = random.random(_CHUNK_ROWS) < 1 / (1 + np.exp(-logits))

    normal = random.standard_normal((_CHUNK_ROWS, len(INTEGERS)))
    largest = 10**_INTEGER_DIGITS - 1
    integers = np.clip(np.expm1(_INTEGER_LOG_MEDIANS + 1.2 * normal), 0, largest).astype(np.int64)
    integer_cells = _decimal(integers)
    integer_cells[random.random(integers.shape) < _INTEGER_MISSING] = 0

    shifts = np.arange(28, -4, -4, dtype=np.uint32)
    hash_cells = _HEX[(hashes.T[:, :, None] >> shifts) & np.uint32(15)]
    missing = np.array([c.missing_rank for c in columns]) == ranks.T
    hash_cells[missing] = 0

    cells = np.concatenate(
        [
            np.where(labels, ord("1"), ord("0")).astype(np.uint8)[:, None],
            _after_tabs(integer_cells),
            _after_tabs(hash_cells),
            np.full((_CHUNK_ROWS, 1), ord("\n"), np.uint8),
        ],
        axis=1,
    )
    return cells


def _mix(values: Array) -> Array:
    """A bijection of uint32 that scatters neighbours (the finalizer of MurmurHash3)."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    values = (values ^ (values >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed: Array = values ^ (values >> np.uint32(16))
    return mixed


def _decimal(values: Array) -> Array:
    """uint8 [..., digits], zeros in front of the first digit being 0 bytes."""
    powers = 10 ** np.arange(_INTEGER_DIGITS - 1, -1, -1)
    digits = (values[..., None] // powers % 10 + ord("0")).astype(np.uint8)
    digits[(values[..., None] < powers) & (powers > 1)] = 0
    return digits


def _after_tabs(cells: Array) -> Array:
    rows, columns, width = cells.shape
    tabbed = np.full((rows, columns, width + 1), ord("\t"), np.uint8)
    tabbed[:, :, 1:] = cells
    return tabbed.reshape(rows, columns * (width + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a synthetic Criteo file in Kaggle's TSV layout.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_file(arguments.out, arguments.rows, arguments.seed)


if __name__ == "__main__":
    main()
