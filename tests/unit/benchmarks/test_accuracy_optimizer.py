"""The accuracy benchmark with Adam at a tiny size: what is restored exactly changes nothing, and rounding moments after
an exact restore comes to the same as restoring rounded ones."""

from __future__ import annotations

import json
import shutil
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import forked
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
EXAMPLES = BENCHMARKS.parent / "examples"
SIZE = ["--train-rows", "500", "--held-out-rows", "100", "--batch-size", "50", "--embedding-dim", "8"]

ROUNDED_AFTERWARDS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from accuracy import _quiet
_quiet()
from accuracy_optimizer_run import adam_learner
from accuracy_run import Conditions, Rows, Run, Wanted
from dlrm_model import start_processes
def main():
    rows = Rows(Path(sys.argv[1]), 500, 100, 50, 60)
    conditions = Conditions(500, 100, 50, 8, 60, 0.02)
    print(Run(conditions, Wanted(0, "bf16+bf16", 1), rows, start_processes(), adam_learner).learn().digest)
"""


def call(forks: ForkServerContext, script: Path, *arguments: object) -> str:
    done = forked.run(forks, script, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rows(forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("accuracy") / "rows.tsv"
    call(forks, EXAMPLES / "synthetic.py", file, "--rows", "600")
    return file


@pytest.fixture(scope="module")
def result(forks: ForkServerContext, rows: Path) -> Path:
    out = rows.parent / "results" / "tiny.json"
    wanted = ["--max-rows-per-table", "60", "--restores", "1", "--seeds", "1", "--codecs", "raw", "bf16", "int2"]
    adam = ["--optimizer", "adam", "--data", rows, "--out", out, *SIZE, *wanted]
    with pytest.raises(AssertionError, match="int2: with adam it takes raw, bf16, fp16, int8"):
        call(forks, BENCHMARKS / "accuracy.py", *adam)
    call(forks, BENCHMARKS / "accuracy.py", *adam[:-1], "int8")
    return out


def runs_of(result: Path) -> dict[tuple[str | None, int], dict[str, Any]]:
    return {(r["codec"], r["restores"]): r for r in json.loads(result.read_text())["runs"]}


def test_an_exact_restore_changes_no_bit_and_one_of_rounded_moments_changes_what_is_learned(result: Path) -> None:
    runs = runs_of(result)
    assert runs["raw", 1]["digest"] == runs[None, 0]["digest"]
    assert len({runs[codec, 1]["digest"] for codec in ("raw", "bf16", "int8")}) == 3
    assert all(runs[codec, 1]["error"]["trained"]["off"] == 0 for codec in ("raw", "bf16", "int8"))
    assert runs["bf16", 1]["bytes"] < runs["raw", 1]["bytes"]


def test_rounding_moments_after_an_exact_restore_comes_to_the_same_as_restoring_rounded_ones(
    forks: ForkServerContext, rows: Path, result: Path, tmp_path: Path
) -> None:
    script = tmp_path / "rounded_afterwards.py"
    script.write_text(ROUNDED_AFTERWARDS)
    assert call(forks, script, rows, BENCHMARKS).strip() == runs_of(result)["bf16", 1]["digest"]


def test_the_first_update_after_a_restore_stays_what_it_was_with_bf16(result: Path) -> None:
    runs = runs_of(result)
    exact = runs["raw", 1]["first_update"]
    assert exact > 0
    assert runs["bf16", 1]["first_update"] == pytest.approx(exact, rel=0.1)


def test_the_section_says_of_each_codec_what_the_runs_came_to(result: Path, tmp_path: Path) -> None:
    from accuracy_optimizer_page import optimizer_section

    assert optimizer_section(tmp_path) == ""
    shutil.copy(result, tmp_path)
    section = optimizer_section(tmp_path)
    assert "| `bf16` | 256 | 1 | tiny | 1 |" in section
    assert "| `int8` | 136 | 1 | tiny | 1 |" in section
    assert "`raw`: 1 of 1 runs end with the uninterrupted run's bits." in section
    assert "The `Checkpointer` takes `raw` and `bf16`." in section


def test_what_is_offered_does_not_fail_on_real_rows_by_five_seeds() -> None:
    from accuracy_figures import Result
    from accuracy_optimizer_page import RESULTS, first_updates

    from incremental_ckpt.codecs.chosen import OPTIMIZER_CODECS

    files = sorted(RESULTS.glob("*.json"))
    assert files
    for result in (Result(json.loads(path.read_text())) for path in files):
        for codec in OPTIMIZER_CODECS:
            for restores in (1, 20):
                change = result.change(codec, restores)
                assert change is not None
                assert change.loss.count >= 5
                assert not change.fails
                assert max(first_updates(result, codec, restores)) <= 1.1
