"""The example's reader and its synthetic file: no sample twice, none skipped, positions that survive, real growth."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import criteo
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic
from criteo import CriteoError, CriteoReader


def numbered_file(path: Path, rows: int) -> Path:
    """A file whose rows are told apart by I1."""
    rest = "\t".join(["7"] * 12 + ["0000000a"] * 26)
    path.write_text("".join(f"{row % 2}\t{row}\t{rest}\n" for row in range(rows)))
    return path


def samples(batch: criteo.Batch) -> list[int]:
    return [int(n) for n in np.rint(np.expm1(batch.dense[:, 0].astype(np.float64)))]


def reader_of(
    path: Path, batch_size: int = 7, keep: int | None = None, rank: int = 0, world_size: int = 1
) -> CriteoReader:
    return CriteoReader(
        path, batch_size=batch_size, max_rows_per_table=1000, keep=keep, rank=rank, world_size=world_size
    )


def test_an_epoch_reads_every_row_exactly_once_in_file_order(tmp_path: Path) -> None:
    reader = reader_of(numbered_file(tmp_path / "f", 50))
    read = [n for _ in range(100) for n in samples(next(reader))]
    assert read == [n % 50 for n in range(700)]


def test_ranks_together_read_every_row_exactly_once(tmp_path: Path) -> None:
    path = numbered_file(tmp_path / "f", 60)
    readers = [reader_of(path, batch_size=5, rank=rank, world_size=3) for rank in range(3)]
    read = Counter(n for _ in range(8) for reader in readers for n in samples(next(reader)))
    assert read == dict.fromkeys(range(60), 2)
    assert [reader.state_dict() for reader in readers] == [readers[0].state_dict()] * 3


@pytest.mark.parametrize("handed_out", [0, 1, 3, 7, 8, 20])
def test_a_reader_goes_on_exactly_where_the_saved_one_stood(tmp_path: Path, handed_out: int) -> None:
    path = numbered_file(tmp_path / "f", 50)
    saved = reader_of(path)
    for _ in range(handed_out):
        next(saved)
    state = saved.state_dict()
    resumed = reader_of(path)
    next(resumed)
    resumed.load_state_dict(state)
    assert resumed.epoch == saved.epoch == handed_out * 7 // 50
    assert [samples(next(resumed)) for _ in range(9)] == [samples(next(saved)) for _ in range(9)]


def test_a_saved_state_does_not_move_on_with_the_reader(tmp_path: Path) -> None:
    reader = reader_of(numbered_file(tmp_path / "f", 50))
    state = reader.state_dict()
    next(reader)
    assert state == reader_of(tmp_path / "f").state_dict()


def test_a_position_in_another_file_is_refused(tmp_path: Path) -> None:
    state = reader_of(numbered_file(tmp_path / "f", 50)).state_dict()
    other = reader_of(numbered_file(tmp_path / "g", 51))
    with pytest.raises(CriteoError, match="another file, of 50 rows, not 51"):
        other.load_state_dict(state)


@pytest.mark.parametrize("keep", [1, 10, 49, 50, 1000])
def test_rows_kept_in_memory_have_no_part_in_what_is_read(
    tmp_path: Path, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo, "_CHUNK_BYTES", 1000)
    reader = reader_of(numbered_file(tmp_path / "f", 50), keep=keep)
    assert reader.rows == 50
    assert [n for _ in range(20) for n in samples(next(reader))] == [n % 50 for n in range(140)]


@pytest.mark.parametrize("chunk", [100, 333, 1 << 20])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("last_newline", [True, False])
def test_cells_are_read_as_written_however_the_file_is_cut(
    tmp_path: Path, chunk: int, newline: str, last_newline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo, "_CHUNK_BYTES", chunk)
    integers = ["", "0", "-3", "42", "123456789012", "1.5", "2e3", "-0", "007", "", "9", "10", "99999"]
    hashes = ["", "ffffffff", "FFFFFFFF", "00000000", *(f"{i * 0x1234567:08x}" for i in range(22))]
    lines = ["\t".join(["1", *integers, *hashes]), "\t".join(["0", *[""] * 39])] * 3
    path = tmp_path / "f"
    path.write_bytes((newline.join(lines) + newline * last_newline).encode())
    reader = reader_of(path, batch_size=6)
    batch = next(reader)
    assert reader.rows == 6
    assert batch.labels.tolist() == [1, 0] * 3
    expected = [math.log1p(max(float(cell or 0), 0)) for cell in integers]
    np.testing.assert_allclose(batch.dense[0::2], [expected] * 3, rtol=1e-6)
    assert not batch.dense[1::2].any()
    ids = [int(cell or "0", 16) % size for cell, size in zip(hashes, reader.table_sizes, strict=True)]
    assert batch.ids[:, 0::2].T.tolist() == [ids] * 3
    assert not batch.ids[:, 1::2].any()


def test_tables_have_the_published_cardinalities_up_to_the_limit(tmp_path: Path) -> None:
    reader = reader_of(numbered_file(tmp_path / "f", 1))
    assert reader.table_sizes[:9] == [1000, 583, 1000, 1000, 305, 24, 1000, 633, 3]
    assert criteo.table_sizes("kaggle", 10**9)[2] == 10_131_227
    assert sum(criteo.table_sizes("kaggle", 10**9)) == 33_762_577


def test_parquet_rows_are_read_with_minus_one_and_null_as_absent(tmp_path: Path) -> None:
    columns: dict[str, pa.Array] = {"label": pa.array([1, 0, 1])}
    columns |= {f"I{i}": pa.array([i, None, -1], pa.int32()) for i in range(1, 14)}
    columns |= {f"C{i}": pa.array([10**12 + i, -1, None], pa.int64()) for i in range(1, 27)}
    columns["part"] = pa.array([0, 0, 0])
    pq.write_table(pa.table(columns), tmp_path / "f")
    reader = reader_of(tmp_path / "f", batch_size=3)
    batch = next(reader)
    assert reader.rows == 3
    assert batch.labels.tolist() == [1, 0, 1]
    np.testing.assert_allclose(batch.dense[0], np.log1p(np.arange(1, 14)), rtol=1e-6)
    assert not batch.dense[1:].any()
    assert batch.ids[:, 0].tolist() == [(10**12 + i) % size for i, size in enumerate(reader.table_sizes, 1)]
    assert not batch.ids[:, 1:].any()


@pytest.fixture(scope="module")
def synthetic_lines() -> list[list[bytes]]:
    text = b"".join(synthetic.generate_rows(10_000, seed=0))
    return [line.split(b"\t") for line in text.splitlines()]


@pytest.mark.parametrize(("rows", "published"), [(128, 1_486), (1_000, 7_651), (4_000, 22_349), (10_000, 43_591)])
def test_synthetic_rows_touch_as_many_ids_as_real_ones(
    synthetic_lines: list[list[bytes]], rows: int, published: int
) -> None:
    touched = {(column, cell) for line in synthetic_lines[:rows] for column, cell in enumerate(line[14:])}
    assert abs(len(touched) / published - 1) < 0.08


def test_synthetic_labels_can_be_learned_from_the_ids(synthetic_lines: list[list[bytes]]) -> None:
    clicks: dict[bytes, list[bool]] = {}
    for line in synthetic_lines:
        clicks.setdefault(line[14 + 8], []).append(line[0] == b"1")  # C9 has three ids
    rates = [sum(labels) / len(labels) for labels in clicks.values() if len(labels) > 200]
    assert 0.15 < sum(line[0] == b"1" for line in synthetic_lines) / len(synthetic_lines) < 0.35
    assert max(rates) - min(rates) > 0.03


def test_a_synthetic_file_depends_on_its_seed_alone_and_grows_at_its_end(tmp_path: Path) -> None:
    synthetic.write_file(tmp_path / "a", 100, seed=1)
    synthetic.write_file(tmp_path / "b", 150, seed=1)
    synthetic.write_file(tmp_path / "c", 150, seed=2)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert b.startswith(a)
    assert b.count(b"\n") == 150
    assert b != c
    assert reader_of(tmp_path / "b").rows == 150
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
