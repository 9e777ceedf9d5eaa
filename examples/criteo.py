"""Reads Criteo click logs: the Kaggle TSV, or parquet with the columns label, I1..I13, C1..C26.

A file is checked to its last row before the first batch leaves; nothing here knows of models or checkpoints.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORICALS = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *INTEGERS, *CATEGORICALS)

Layout = Literal["kaggle", "terabyte"]
_FIT_OF_LAYOUT: Mapping[Layout, str] = {"kaggle": "kaggle_head10k", "terabyte": "tb_recis80k"}
_CHUNK_BYTES = 4 << 20
_PARQUET_ROWS = 1 << 16

_TAB, _NEWLINE, _MINUS, _ZERO, _ONE = (ord(c) for c in "\t\n-01")
_HEX_DIGITS = 8
_NOT_HEX = 255
_HEX = np.full(256, _NOT_HEX, np.uint8)
for _digit, _character in enumerate("0123456789abcdef"):
    _HEX[ord(_character)] = _HEX[ord(_character.upper())] = _digit

Array = npt.NDArray[Any]


class CriteoError(ValueError):
    """A file that is not a whole and sound Criteo file; the message names the file and the line or row."""


@dataclass(frozen=True)
class ColumnFit:
    """Published facts of one categorical column, and p(rank) ~ (rank + q)^-s over 1..ranks as fitted to real rows."""

    column: str
    cardinality: int
    missing: float
    top1: float
    s: float
    q: float
    ranks: int


class Batch(NamedTuple):
    """One batch in host memory.

    Attributes:
        dense: float32 [batch, 13], log1p of the integer features.
        ids: int64 [26, batch], each below its table's size.
        labels: float32 [batch], 0 or 1.
    """

    dense: Array
    ids: Array
    labels: Array


class _Block(NamedTuple):
    """Parsed rows in file order: labels uint8 [n], dense float32 [n, 13], ids int32 [26, n]."""

    labels: Array
    dense: Array
    ids: Array


def column_fits(fit: str = _FIT_OF_LAYOUT["kaggle"]) -> list[ColumnFit]:
    with Path(__file__).with_name("criteo_fits.csv").open(newline="") as file:
        return [
            ColumnFit(
                r["col"],
                int(r["card"]),
                float(r["missing"]),
                float(r["top1"]),
                float(r["s"]),
                float(r["q"]),
                int(r["N"]),
            )
            for r in csv.DictReader(file)
            if r["fit"] == fit
        ]


def layout_of(path: Path) -> Layout:
    """By content, not by name. Raises CriteoError for what is no readable file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise CriteoError(f"{path}: no such file") from None
    except OSError as error:
        raise CriteoError(f"{path}: cannot be read: {error.strerror}") from None
    if not magic:
        raise CriteoError(f"{path}: the file is empty")
    if magic.startswith(b"\x1f\x8b"):
        raise CriteoError(f"{path}: the file is gzip-compressed; unpack it first")
    return "terabyte" if magic == b"PAR1" else "kaggle"


def table_sizes(layout: Layout, max_rows: int) -> list[int]:
    """Rows of the 26 tables: the column's published cardinality, at most max_rows."""
    return [min(fit.cardinality, max_rows) for fit in column_fits(_FIT_OF_LAYOUT[layout])]


class CriteoReader:
    """Endless batches in file order; after the last row comes the first one again, in the same batch if need be.

    Every rank has the same position and takes its own part of each global batch (``batch_size`` samples per rank): over
    all ranks, an epoch reads each row exactly once. The position moves when a batch is handed out, so save it once that
    batch is trained.

    Raises CriteoError on construction if any row of the file is unsound, also of rows that will not be read.
    ``keep`` is how many rows are expected to be needed: only so many are held in memory.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        batch_size: int,
        max_rows_per_table: int,
        keep: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.path = Path(path)
        self.layout = layout_of(self.path)
        self.table_sizes = table_sizes(self.layout, max_rows_per_table)
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._position = 0
        self._identity = _identity(self.path)
        self._load(keep)

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return self._rows

    @property
    def epoch(self) -> int:
        """How often the whole file has been read."""
        return self._position // self._rows

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        end = self._position + self._world_size * self._batch_size
        if len(self._kept.labels) < min(end, self._rows):
            self._load(2 * end)
        start = self._position + self._rank * self._batch_size
        rows = np.arange(start, start + self._batch_size) % self._rows
        self._position = end
        return Batch(
            self._kept.dense[rows],
            self._kept.ids[:, rows].astype(np.int64),
            self._kept.labels[rows].astype(np.float32),
        )

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks stand together: samples handed out since the first epoch began, and of which file."""
        return {"samples": self._position, "rows": self._rows, "file": self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CriteoError if the state was taken from another file: positions would mean other samples."""
        if (state["rows"], state["file"]) != (self._rows, self._identity):
            raise CriteoError(
                f"{self.path}: the checkpoint was reading another file, of {state['rows']} rows, not {self._rows}; "
                "give the file that the run began with, or another store"
            )
        self._position = int(state["samples"])

    def _load(self, keep: int | None) -> None:
        blocks = (_tsv_blocks if self.layout == "kaggle" else _parquet_blocks)(self.path, self.table_sizes)
        kept: list[_Block] = []
        rows = 0
        for block in blocks:
            if keep is None or rows < keep:
                kept.append(block)
            rows += len(block.labels)
        if not rows:
            raise CriteoError(f"{self.path}: the file has no rows")
        self._rows = rows
        self._kept = _Block(
            np.concatenate([b.labels for b in kept]),
            np.concatenate([b.dense for b in kept]),
            np.concatenate([b.ids for b in kept], axis=1),
        )


def _identity(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(1 << 20) + str(path.stat().st_size).encode()).hexdigest()


def _tsv_blocks(path: Path, sizes: Sequence[int]) -> Iterator[_Block]:
    first_line = 1
    with path.open("rb") as file:
        for lines in _whole_lines(file):
            text = np.frombuffer(lines, np.uint8)
            block = _parse_tsv(text, sizes, first_line, path)
            first_line += len(block.labels)
            yield block


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    rest = b""
    while chunk := file.read(_CHUNK_BYTES):
        lines, newline, rest_of_chunk = (rest + chunk).rpartition(b"\n")
        rest = rest_of_chunk
        if newline:
            yield lines.replace(b"\r\n", b"\n").removesuffix(b"\r") + b"\n"
        elif len(rest) > 4 * _CHUNK_BYTES:
            break  # no text file of lines: the columns of this "line" will be found wrong
    if rest:
        yield rest.removesuffix(b"\r") + b"\n"


def _parse_tsv(text: Array, sizes: Sequence[int], first_line: int, path: Path) -> _Block:
    ends: Array = np.flatnonzero((text == _TAB) | (text == _NEWLINE))
    line_ends = np.flatnonzero(text[ends] == _NEWLINE)
    columns = np.diff(line_ends, prepend=-1)
    uneven = np.flatnonzero(columns != len(COLUMNS))
    rows = int(uneven[0]) if uneven.size else len(columns)
    starts = np.concatenate(([0], ends[:-1] + 1))[: rows * len(COLUMNS)].reshape(rows, len(COLUMNS))
    ends = ends[: rows * len(COLUMNS)].reshape(rows, len(COLUMNS))
    # Short cells are read past their end and masked: the last ones need room behind them.
    text = np.concatenate((text, np.zeros(_HEX_DIGITS, np.uint8)))

    def cell(row: int, column: int) -> str:
        return text[starts[row, column] : ends[row, column]].tobytes().decode("utf-8", "replace")

    def where(row: int) -> str:
        return f"{path}, line {first_line + row}"

    labels = text[starts[:, 0]]
    bad_labels = (ends[:, 0] - starts[:, 0] != 1) | ((labels != _ZERO) & (labels != _ONE))
    integers, odd = _parse_integers(text, starts[:, 1:14], ends[:, 1:14])
    bad_integers = np.zeros_like(odd)
    for row, column in np.argwhere(odd):  # rare: decimals and exponents
        integers[row, column] = number = _finite(cell(row, column + 1))
        bad_integers[row, column] = np.isnan(number)
    hashes, bad_hashes = _parse_hashes(text, starts[:, 14:], ends[:, 14:])
    _refuse_first(
        np.column_stack((bad_labels, bad_integers, bad_hashes)),
        lambda row, column: f"{where(row)}: {_complaint(column, cell(row, column))}",
    )
    if uneven.size:
        found = int(columns[rows])
        hint = "; there is no label, as in a test file" if found == len(COLUMNS) - 1 else ""
        raise CriteoError(
            f"{where(rows)}: {found} tab-separated columns instead of {len(COLUMNS)} "
            f"(label, 13 integers, 26 categoricals){hint}"
        )
    return _Block(labels - _ZERO, _log(integers), _ids(hashes, sizes))


def _parse_integers(text: Array, starts: Array, ends: Array) -> tuple[Array, Array]:
    """Values float64 (0 for an empty cell), and which cells are something else than an integer of up to 18 digits."""
    negative = (text[starts] == _MINUS) & (ends > starts)
    first = starts + negative
    width = ends - first
    values = np.zeros(starts.shape, np.int64)
    odd = ((width == 0) & negative) | (width > 18)
    for place in range(int(min(width.max(initial=0), 18))):
        inside = width > place
        digits = text[np.where(inside, first + place, 0)] - _ZERO
        odd |= inside & (digits > 9)
        values = np.where(inside, values * 10 + digits, values)
    return np.where(negative, -values, values).astype(np.float64), odd


def _parse_hashes(text: Array, starts: Array, ends: Array) -> tuple[Array, Array]:
    """Values int64 (0 for an empty cell), and which cells are neither empty nor 8 hex digits."""
    present = ends > starts
    bad = present & (ends - starts != _HEX_DIGITS)
    values = np.zeros(starts.shape, np.int64)
    for place in range(_HEX_DIGITS):
        digits = _HEX[text[starts + place]]
        bad |= present & (digits == _NOT_HEX)
        values = (values << 4) | digits
    return np.where(present, values, 0), bad


def _finite(cell: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        return float("nan")
    return number if np.isfinite(number) else float("nan")


def _complaint(column: int, cell: str) -> str:
    name = COLUMNS[column]
    shown = repr(cell if len(cell) <= 40 else cell[:40] + "…")
    if name == "label":
        return f"the label is {shown}, not 0 or 1" if cell else "there is no label"
    return f"{name} is {shown}, not a number" if name in INTEGERS else f"{name} is {shown}, not 8 hex digits"


def _refuse_first(bad: Array, message: Callable[[int, int], str]) -> None:
    """Raises CriteoError for the first bad cell in reading order of bad [rows, columns], if there is one."""
    at = int(bad.argmax()) if bad.size else 0
    if bad.size and bad.flat[at]:
        row, column = divmod(at, bad.shape[1])
        raise CriteoError(message(row, column))


def _log(integers: Array) -> Array:
    return np.log1p(np.maximum(integers, 0)).astype(np.float32)


def _ids(hashes: Array, sizes: Sequence[int]) -> Array:
    return np.ascontiguousarray((hashes % np.asarray(sizes, np.int64)).T.astype(np.int32))


def _parquet_blocks(path: Path, sizes: Sequence[int]) -> Iterator[_Block]:
    try:
        import pyarrow as pa  # optional, and only this layout needs it
        import pyarrow.parquet as pq
    except ImportError:
        raise CriteoError(f"{path}: reading parquet needs pyarrow (pip install pyarrow)") from None
    try:
        with pq.ParquetFile(path) as file:
            _check_schema(file.schema_arrow, path)
            first_row = 1
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=list(COLUMNS)):
                block = _parse_parquet(batch, sizes, first_row, path)
                first_row += len(block.labels)
                yield block
    except (pa.ArrowException, OSError) as error:
        raise CriteoError(f"{path}: no whole parquet file: {str(error).splitlines()[0]}") from None


def _check_schema(schema: Any, path: Path) -> None:
    import pyarrow.types as types

    absent = [name for name in COLUMNS if name not in schema.names]
    if "label" in absent:
        raise CriteoError(f"{path}: there is no column 'label'")
    if absent:
        raise CriteoError(f"{path}: columns are missing: {', '.join(absent)}")
    for name in COLUMNS:
        kind = schema.field(name).type
        numeric = (
            types.is_integer(kind) or types.is_boolean(kind) or (name not in CATEGORICALS and types.is_floating(kind))
        )
        if not numeric:
            wanted = "integers" if name in CATEGORICALS else "numbers"
            raise CriteoError(f"{path}: column {name} holds {kind}, not {wanted}")


def _parse_parquet(batch: Any, sizes: Sequence[int], first_row: int, path: Path) -> _Block:
    import pyarrow as pa

    def values(name: str, kind: Any, absent: float) -> Array:
        column = batch.column(batch.schema.get_field_index(name))
        cast: Array = column.cast(kind, safe=False).fill_null(absent).to_numpy(zero_copy_only=False)
        return cast

    labels = values("label", pa.float64(), -1)
    integers = np.column_stack([values(name, pa.float64(), 0) for name in INTEGERS])
    integers[np.isnan(integers)] = 0  # pandas' way to leave a number out
    hashes = np.column_stack([values(name, pa.int64(), -1) for name in CATEGORICALS])

    def complaint(row: int, column: int) -> str:
        name = COLUMNS[column]
        value = batch.column(batch.schema.get_field_index(name))[row].as_py()
        if value is None:
            text = "there is no label"
        elif name == "label":
            text = f"the label is {value}, not 0 or 1"
        elif name in INTEGERS:
            text = f"{name} is {value}, not a number"
        else:
            text = f"{name} is {value}; an id is 0 or more, and -1 means that there is none"
        return f"{path}, row {first_row + row}: {text}"

    bad = np.column_stack(((labels != 0) & (labels != 1), ~np.isfinite(integers), hashes < -1))
    _refuse_first(bad, complaint)
    return _Block(labels.astype(np.uint8), _log(integers), _ids(np.maximum(hashes, 0), sizes))
