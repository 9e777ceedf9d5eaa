"""The benchmark of stores at a tiny size: every measure says something sane; how fast is no matter here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("benchmark")
    out = folder / "stores.json"
    command = [sys.executable, str(BENCHMARKS / "stores.py"), "--mib", "9", "--repeats", "2", "--budget", "0"]
    command += ["--folder", str(folder / "disk"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((folder / "disk").iterdir()) == []
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_both_directions_of_both_stores_have_the_target(result: dict[str, Any]) -> None:
    aims = [row for row in result["rows"] if row["target"] is not None]
    measured = [tuple(row["what"].split(":")[0].split(", ")) for row in aims]
    assert measured == [("upload", "s3"), ("upload", "local"), ("download", "s3"), ("download", "local")]
    assert {(row["target"]["bound"], row["target"]["value"]) for row in aims} == {("at least", 0.8)}


def test_every_ratio_is_a_number_with_the_speeds_beside_it(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert row["repeats"] == 2
        assert row["ratio"] > 0
        assert math.isfinite(row["ratio"])
        assert min(row["details"].values()) > 0
        assert row["reached"] is (None if row["target"] is None else row["ratio"] >= 0.8)
