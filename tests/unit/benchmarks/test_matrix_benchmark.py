"""The matrix at a tiny size: every measure runs and says something sane; how fast is no matter here."""

from __future__ import annotations

import json
import math
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from fitting import sizes_that_fit
from matrix import MEASURES
from popularity import Popularity, table_sizes

MATRIX = Path(__file__).parents[3] / "benchmarks" / "matrix.py"
Result = dict[str, Any]


@pytest.fixture(scope="module")
def results(forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("matrix")
    sizes = [
        "--rows", "20000", "--dim", "16", "--batch", "64", "--threads", "1",
        "--shares", "0.02,0.26", "--intervals", "2", "--codecs", "raw,int2",
        "--growth-rows", "20000,40000", "--changed", "2000", "--ranks", "1,2", "--repeats", "1", "--normal-priority",
    ]  # fmt: skip
    done = forked.run(forks, MATRIX, *sizes, "--store", folder / "store", "--out", folder, "--name", "tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((folder / "store").iterdir()) == []
    return {name: json.loads((folder / f"matrix-{name}-tiny.json").read_text()) for name in MEASURES}


def rows_of(result: Result, measure: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["measure"] == measure]


def test_every_figure_is_a_positive_ratio_with_its_conditions(results: dict[str, Result]) -> None:
    for name, result in results.items():
        assert result["rows"], name
        for row in result["rows"]:
            assert math.isfinite(row["ratio"]), row
            assert row["ratio"] > 0, row
        for condition in ("commit", "versions", "cpu", "cores", "file_system", "dim", "threads", "optimizer"):
            assert result["conditions"][condition], (name, condition)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("shares", [("at most", 2.0), ("at most", 1.5)]),
        ("growth", [("at most", 1.5)]),
        ("fewer-bytes", [("at least", 13.5), ("at least", 24.0), ("at least", 38.0)]),
        ("others", [("at least", 25.0)]),
    ],
)
def test_each_measure_is_held_to_its_targets(results: dict[str, Result], name: str, targets: list[Any]) -> None:
    found = [row["target"] for row in results[name]["rows"] if row["target"] is not None]
    assert [(t["bound"], t["value"]) for t in found] == targets


def test_deltas_carry_the_wanted_share(results: dict[str, Result]) -> None:
    for row, share in zip(rows_of(results["shares"], "stall by share"), (0.02, 0.26), strict=True):
        # One ordinary step touches some rows more, at this size.
        assert row["details"]["share"] == pytest.approx(share, abs=0.03)
    for row in rows_of(results["shares"], "stall by share"):
        # The planner makes the smallest tables data-parallel: their rows have a whole row of optimizer state.
        assert 4 * (16 + 1) <= row["details"]["gathered_bytes"] / row["details"]["rows"] <= 4 * (16 + 16)


def test_the_same_number_of_rows_changes_whatever_the_size(results: dict[str, Result]) -> None:
    rows = [row["details"] for row in rows_of(results["growth"], "growth with rows") if "rows" in row["details"]]
    assert [r["table_rows"] for r in rows] == pytest.approx([20000, 40000], rel=0.1)
    assert rows[0]["rows"] == pytest.approx(rows[1]["rows"], rel=0.15)
    assert all(0 < r["scan_seconds"] < r["stall_seconds"] for r in rows)


def test_fewer_bits_are_fewer_bytes_and_raw_is_the_share(results: dict[str, Result]) -> None:
    ratios = [row["ratio"] for row in results["fewer-bytes"]["rows"]]
    assert ratios == sorted(ratios)
    raw = results["fewer-bytes"]["rows"][0]
    assert raw["ratio"] == pytest.approx(1 / raw["details"]["share"], rel=0.1)
    assert raw["details"]["share"] == pytest.approx(0.26, rel=0.1)


def test_what_kinds_write_and_store_follows_from_what_they_are(results: dict[str, Result]) -> None:
    raw = {
        (row["details"]["kind"], row["details"]["wanted_share"]): row["details"]
        for row in rows_of(results["kinds"], "bytes by kind")
        if row["details"]["codec"] == "raw"
    }
    for share in (0.02, 0.26):
        full, consecutive, one_shot = (raw[kind, share] for kind in ("full", "consecutive", "one-shot"))
        base = full["stored_bytes"]
        assert base == pytest.approx(full["full_bytes"], rel=0.02)
        assert full["written_in_all_bytes"] == 2 * base
        assert consecutive["written_in_all_bytes"] < one_shot["written_in_all_bytes"] < full["written_in_all_bytes"]
        assert one_shot["stored_bytes"] < consecutive["stored_bytes"]
        assert consecutive["stored_bytes"] == base + consecutive["written_in_all_bytes"]


def test_other_checkpointers_write_the_whole_model(results: dict[str, Result]) -> None:
    rows = rows_of(results["others"], "other checkpointers, stall")
    names = {row["details"]["checkpointer"] for row in rows}
    assert {"torch.save", "dcp.save", "dcp.async_save, thread", "dcp.async_save, process"} < names
    for row in rows:
        assert row["details"]["written_bytes"] > results["others"]["conditions"]["rows"] * 0.9 * (16 + 1) * 4
        assert row["details"]["stall_seconds"] <= row["details"]["durable_seconds"]


def test_trackers_find_the_same_rows(results: dict[str, Result]) -> None:
    details = results["delta-tracker"]["rows"][-1]["details"]
    assert 0.9 * details["our_rows"] <= details["torchrec_rows"] <= details["our_rows"]


def test_ranks_write_together_what_one_writes(results: dict[str, Result]) -> None:
    (row,) = [row for row in results["ranks"]["rows"] if row["what"].startswith("bytes")]
    assert row["ratio"] == pytest.approx(1, abs=0.25)


def test_the_smallest_models_are_kept_where_memory_is_short() -> None:
    assert sizes_that_fit([50_000_000, 1_000_000, 10_000_000], 64, 8 << 30) == [1_000_000, 10_000_000]
    assert sizes_that_fit([50_000_000, 1_000_000, 10_000_000], 64, 64 << 30) == [1_000_000, 10_000_000, 50_000_000]


@pytest.mark.parametrize("rows", [20_000, 33_000_000, 50_000_000])
def test_a_model_has_about_as_many_rows_as_asked_for(rows: int) -> None:
    assert sum(table_sizes(rows)) == pytest.approx(rows, rel=0.02)


def test_popular_rows_come_again_and_the_share_is_kept() -> None:
    popularity = Popularity(table_sizes(200_000))
    samples = popularity.samples_for(0.1)
    first, second = (popularity.interval(samples, np.random.default_rng(seed)) for seed in (1, 2))
    count = sum(rows.size for rows in first)
    assert count == pytest.approx(0.1 * 200_000, rel=0.05)
    again = sum(np.intersect1d(a, b).size for a, b in zip(first, second, strict=True))
    assert again > 2 * 0.1 * count  # as many as of rows that are all alike would be a tenth


def test_an_unknown_measure_is_refused_by_name(forks: ForkServerContext) -> None:
    done = forked.run(forks, MATRIX, "--only", "shares,colour")
    assert done.returncode == 2
    assert "no such measure: colour" in done.stderr
