"""The benchmark at a tiny size: every measure runs and says something sane; how fast is no matter here."""

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
TARGETS = {
    "memory": [("at most", 1.0), ("at most", 1.0)],
    "tracking": [("at most", 1.01)],
    "stall": [("at most", 2.0), ("at most", 2.0)],
    "bytes": [("at most", 1.03)],
    "base": [("at most", 1.0)],
    "peers": [("at least", 25.0)],
    "speed": [("at least", 0.9), ("at least", 0.85)],
}


def run(forks: ForkServerContext, out: Path, *arguments: str) -> CompletedProcess[str]:
    return forked.run(forks, BENCHMARKS / "save.py", "--store", out.parent / "store", "--out", out, *arguments)


@pytest.fixture(scope="module")
def finished(forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("benchmark") / "tiny.json"
    done = run(
        forks, out, "--rows", "20000", "--dim", "16", "--batch", "64", "--share", "0.2", "--threads", "1",
        "--repeats", "2", "--seconds", "0.1", "--budget", "0",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def result(finished: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(finished.read_text())
    return found


def rows_of(result: dict[str, Any], measure: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["measure"] == measure]


@pytest.mark.parametrize("measure", TARGETS)
def test_every_measure_yields_its_targets(result: dict[str, Any], measure: str) -> None:
    targets = [row["target"] for row in rows_of(result, measure) if row["target"] is not None]
    assert [(t["bound"], t["value"]) for t in targets] == TARGETS[measure]


def test_every_figure_is_a_positive_ratio_between_its_quartiles(result: dict[str, Any]) -> None:
    by_phase = "stall, by phase (a pass of its own)"
    for row in result["rows"]:
        low, high = row["quartiles"]
        assert math.isfinite(row["ratio"]), row
        assert row["ratio"] > 0 or row["measure"] == by_phase, row
        assert low <= row["ratio"] <= high, row
        assert row["repeats"] == (1 if row["what"].startswith("peak extra memory of a base") else 2), row


def test_reached_says_whether_the_ratio_keeps_to_the_target(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        if row["target"] is None:
            assert row["reached"] is None
        else:
            at_most = row["target"]["bound"] == "at most"
            gap = row["target"]["value"] - row["ratio"]
            assert row["reached"] == (gap >= 0 if at_most else gap <= 0)


def test_an_interval_changes_the_wanted_share_of_the_rows(result: dict[str, Any]) -> None:
    for measure in ("stall", "bytes"):
        for row in rows_of(result, measure):
            assert row["details"]["share"] == pytest.approx(0.2, rel=0.15)


def test_the_bare_gather_copies_what_a_delta_carries_of_rows(result: dict[str, Any]) -> None:
    (stored,) = rows_of(result, "bytes")
    for row in rows_of(result, "stall"):
        assert row["details"]["rows"] == stored["details"]["rows"]
        assert row["details"]["gathered_bytes"] == stored["details"]["rows_bytes"]


def test_the_phases_of_a_stall_are_all_met(result: dict[str, Any]) -> None:
    phases = {r["what"]: r["details"]["phase_seconds"] for r in rows_of(result, "stall, by phase (a pass of its own)")}
    assert {"scan the marks", "find the state", "flatten the state", "gather the rows", "copy the state"} <= set(phases)
    assert all(seconds > 0 for seconds in phases.values()), phases


def test_a_delta_holds_what_it_must_and_little_else(result: dict[str, Any]) -> None:
    (row,) = rows_of(result, "bytes")
    details = row["details"]
    assert details["rows_bytes"] >= details["rows"] * (16 + 1) * 4
    must = details["rows_bytes"] + details["index_bytes"] + details["dense_bytes"]
    assert must < details["delta_bytes"] < 2 * must


def test_the_conditions_name_code_machine_and_workload(result: dict[str, Any]) -> None:
    conditions = result["conditions"]
    assert conditions["tables"] == 26
    assert 0.9 * 20000 <= conditions["rows"] <= 20000
    for name in ("commit", "versions", "cpu", "cores", "memory_bytes", "file_system", "share", "dim", "optimizer"):
        assert conditions[name], name


def test_nothing_is_left_in_the_store(finished: Path) -> None:
    assert list((finished.parent / "store").iterdir()) == []


def test_an_unknown_measure_is_refused_by_name(forks: ForkServerContext, tmp_path: Path) -> None:
    done = run(forks, tmp_path / "out.json", "--only", "stall,colour")
    assert done.returncode == 2
    assert "no such measure: colour" in done.stderr
