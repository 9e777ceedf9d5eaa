"""What a user sees who gives the example no sound Criteo file: one line that names file and line, exit code 2."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import forked
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "dlrm_criteo.py"
GOOD = ["0", *(str(i) for i in range(13)), *(f"{i:08x}" for i in range(26))]


Refused = Callable[[Path], str]


@pytest.fixture
def refused(forks: ForkServerContext) -> Refused:
    """The one line on stderr with which the example refuses a file."""

    def run(path: Path) -> str:
        finished = forked.run(forks, EXAMPLE, "--data", path, "--steps", 1)
        assert finished.returncode == 2, finished.stderr
        assert finished.stdout == ""
        (line,) = finished.stderr.splitlines()
        assert line.startswith(f"error: {path}"), line
        return line

    return run


def with_cell(column: int, value: str) -> str:
    return "\t".join([*GOOD[:column], value, *GOOD[column + 1 :]])


@pytest.mark.parametrize(
    ("third_line", "complaint"),
    [
        ("\t".join(GOOD[:30]), "30 tab-separated columns instead of 40"),
        ("\t".join([*GOOD, "x"]), "41 tab-separated columns instead of 40"),
        ("\t".join(GOOD[1:]), "39 tab-separated columns instead of 40"),
        ("\t".join(GOOD[1:]), "no label"),
        ("", "1 tab-separated columns instead of 40"),
        (with_cell(0, ""), "there is no label"),
        (with_cell(0, "2"), "the label is '2', not 0 or 1"),
        (with_cell(0, "10"), "the label is '10', not 0 or 1"),
        (with_cell(5, "abc"), "I5 is 'abc', not a number"),
        (with_cell(5, "-"), "I5 is '-', not a number"),
        (with_cell(5, "nan"), "I5 is 'nan', not a number"),
        (with_cell(13, "1 2"), "I13 is '1 2', not a number"),
        (with_cell(14, "68fd1e6"), "C1 is '68fd1e6', not 8 hex digits"),
        (with_cell(39, "68fd1e6g"), "C26 is '68fd1e6g', not 8 hex digits"),
    ],
)
def test_a_bad_line_is_refused_with_file_line_and_reason_before_training(
    refused: Refused, tmp_path: Path, third_line: str, complaint: str
) -> None:
    path = tmp_path / "train.txt"
    good = "\t".join(GOOD)
    path.write_text(f"{good}\n{good}\n{third_line}\n{good}\n")
    line = refused(path)
    assert f"{path}, line 3: " in line
    assert complaint in line


def test_the_first_of_several_bad_lines_is_named(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    lines = ["\t".join(GOOD)] * 5
    lines[2], lines[3] = with_cell(20, "x"), "too\tshort"
    path.write_text("\n".join(lines))
    assert ", line 3: C7 is 'x'" in refused(path)


def test_a_bad_line_that_the_run_would_not_reach_is_refused_too(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(("\t".join(GOOD) + "\n") * 30_000 + with_cell(0, "x") + "\n")
    assert ", line 30001: the label is 'x'" in refused(path)


def test_a_header_line_is_no_row(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("\t".join(["label", *(f"c{i}" for i in range(39))]) + "\n" + "\t".join(GOOD) + "\n")
    assert ", line 1: the label is 'label'" in refused(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "the file is empty"),
        (gzip.compress(b"0\t1\n"), "gzip"),
        (b"a,b,c\n1,2,3\n", "line 1: 1 tab-separated columns"),
        (bytes(range(128, 256)) * 100, "line 1: 1 tab-separated columns"),
    ],
    ids=["empty", "gzip", "csv", "binary"],
)
def test_another_kind_of_file_is_refused(refused: Refused, tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(content)
    assert complaint in refused(path)


def test_a_file_that_is_not_there_is_refused(refused: Refused, tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "nowhere.txt")


def test_a_folder_is_refused(refused: Refused, tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path)


def parquet_columns(rows: int = 5) -> dict[str, pa.Array]:
    columns = {"label": pa.array([0] * rows, pa.int8())}
    columns |= {f"I{i}": pa.array([i] * rows, pa.int32()) for i in range(1, 14)}
    columns |= {f"C{i}": pa.array([i] * rows, pa.int64()) for i in range(1, 27)}
    return columns


@pytest.mark.parametrize(
    ("name", "column", "complaint"),
    [
        ("C7", None, "columns are missing: C7"),
        ("label", None, "there is no column 'label'"),
        ("label", pa.array([0, 0, None, 0, 0], pa.int8()), ", row 3: there is no label"),
        ("label", pa.array([0, 0, 3, 0, 0], pa.int8()), ", row 3: the label is 3, not 0 or 1"),
        ("I5", pa.array(["a"] * 5), "column I5 holds string, not numbers"),
        ("I5", pa.array([0, 0, float("inf"), 0, 0]), ", row 3: I5 is inf, not a number"),
        ("C5", pa.array([0.5] * 5), "column C5 holds double, not integers"),
        ("C5", pa.array([0, 0, -7, 0, 0], pa.int64()), ", row 3: C5 is -7"),
    ],
)
def test_a_bad_parquet_file_is_refused_with_file_row_and_reason(
    refused: Refused, tmp_path: Path, name: str, column: pa.Array | None, complaint: str
) -> None:
    path = tmp_path / "train.parquet"
    columns = parquet_columns()
    if column is None:
        del columns[name]
    else:
        columns[name] = column
    pq.write_table(pa.table(columns), path)
    assert complaint in refused(path)


def test_an_empty_or_truncated_parquet_file_is_refused(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table(parquet_columns(rows=0)), path)
    assert "the file has no rows" in refused(path)
    pq.write_table(pa.table(parquet_columns()), path)
    path.write_bytes(path.read_bytes()[:-100])
    assert "no whole parquet file" in refused(path)
