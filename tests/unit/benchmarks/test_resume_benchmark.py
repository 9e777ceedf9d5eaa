"""The benchmark of resumes at a tiny size: every measure says something sane; how fast is no matter here."""

from __future__ import annotations

import json
import math
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import forked
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TINY = ["--rows", "20000", "--dim", "16", "--batch", "64", "--share", "0.1", "--threads", "1", "--repeats", "2"]
TINY += ["--seconds", "0.1", "--budget", "0", "--checkpoints", "20", "--deltas", "1,3", "--max-overhead", "0.9"]


def run(forks: ForkServerContext, out: Path, *arguments: str) -> CompletedProcess[str]:
    return forked.run(forks, BENCHMARKS / "resume.py", "--store", out.parent / "store", "--out", out, *arguments)


@pytest.fixture(scope="module")
def finished(forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("benchmark") / "tiny.json"
    done = run(forks, out, *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def result(finished: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(finished.read_text())
    return found


def rows_of(result: dict[str, Any], measure: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["measure"] == measure]


def test_every_measure_yields_its_rows_and_targets(result: dict[str, Any]) -> None:
    targets = {
        measure: [(row["target"] or {}).get("value") for row in rows_of(result, measure)]
        for measure in ("resume", "recovery", "ls")
    }
    assert targets == {"resume": [None, None, 1.1], "recovery": [1.9, 10.0], "ls": [3.0, 3.0]}


def test_every_figure_is_a_positive_ratio_between_its_quartiles(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        low, high = row["quartiles"]
        assert math.isfinite(row["ratio"]), row
        assert 0 < low <= row["ratio"] <= high, row
        assert row["repeats"] == 2, row


def test_a_longer_chain_names_its_rows_and_a_compacted_one_no_more_than_a_base(result: dict[str, Any]) -> None:
    one, three, compacted = (row["details"]["named_bytes"] for row in rows_of(result, "resume"))
    rows, row_bytes = result["conditions"]["rows"], (16 + 1) * 4
    assert three - one >= 2 * 0.09 * rows * row_bytes
    assert rows * row_bytes <= compacted < one


def test_recovery_is_told_with_its_parts(result: dict[str, Any]) -> None:
    overhead, expected = (row["details"] for row in rows_of(result, "recovery"))
    assert overhead["saves"] >= 2
    assert overhead["interval_seconds"] == expected["interval_seconds"] > 0
    assert expected["chain_length"] >= 1 + overhead["saves"]
    assert expected["dcp_interval_seconds"] == pytest.approx(expected["dcp_save_seconds"] / 0.9)


def test_nothing_is_left_in_the_store(finished: Path) -> None:
    assert list((finished.parent / "store").iterdir()) == []


def test_quantized_chains_are_measured_without_targets(forks: ForkServerContext, tmp_path: Path) -> None:
    resumes = ["--only", "resume", "--rows", "5000", "--deltas", "2", "--codec", "int8"]
    done = run(forks, tmp_path / "out.json", *TINY, *resumes)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["target"], row["details"]["codec"]) for row in rows] == [(None, "int8")] * 2


def test_an_unknown_measure_is_refused_by_name(forks: ForkServerContext, tmp_path: Path) -> None:
    done = run(forks, tmp_path / "out.json", "--only", "resume,colour")
    assert done.returncode == 2
    assert "no such measure: colour" in done.stderr
