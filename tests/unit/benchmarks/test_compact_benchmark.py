"""The benchmark of compaction at a tiny size: every measure says something sane; how fast is no matter here."""

from __future__ import annotations

import json
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import forked
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def result(forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("benchmark")
    out = folder / "compact.json"
    sizes = ["--mib", "20", "--deltas", "3", "--repeats", "2", "--memory", "64"]
    done = forked.run(forks, BENCHMARKS / "compact.py", *sizes, "--folder", folder / "disk", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((folder / "disk").iterdir()) == []
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_memory_and_speed_have_their_targets(result: dict[str, Any]) -> None:
    targets = {row["measure"]: (row["target"]["bound"], row["target"]["value"]) for row in result["rows"]}
    assert targets == {"memory": ("at most", 1.0), "compaction": ("at least", 0.5)}
    assert all(row["repeats"] == 2 and row["ratio"] > 0 for row in result["rows"])


def test_the_chain_and_what_is_written_of_it_have_the_wanted_sizes(result: dict[str, Any]) -> None:
    (speed,) = (row for row in result["rows"] if row["measure"] == "compaction")
    details = speed["details"]
    assert details["chain_bytes"] == pytest.approx(20 << 20, rel=0.05)
    assert details["written_bytes"] == pytest.approx((20 << 20) / 1.06, rel=0.05)
    assert details["read_bytes"] >= details["written_bytes"]
