"""The accuracy benchmark at a tiny size, on a synthetic file: runs are made in pieces, controls are exact, and the page
says what the figures say."""

from __future__ import annotations

import json
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import forked
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
EXAMPLES = BENCHMARKS.parent / "examples"


def call(forks: ForkServerContext, script: Path, *arguments: object) -> str:
    done = forked.run(forks, script, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def results(forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one result of one seed."""
    folder = tmp_path_factory.mktemp("accuracy")
    rows, out = folder / "rows.tsv", folder / "results" / "tiny.json"
    call(forks, EXAMPLES / "synthetic.py", rows, "--rows", "600")
    size = ["--train-rows", "500", "--held-out-rows", "100", "--batch-size", "50", "--embedding-dim", "8"]
    wanted = ["--max-rows-per-table", "60", "--codecs", "raw", "int2", "--restores", "0", "1", "--seeds", "1"]
    told = call(forks, BENCHMARKS / "accuracy.py", "--data", rows, "--out", out, *size, *wanted)
    assert told.count("seed 0") == 5
    assert "all runs are there" in told
    return out.parent


def runs_of(results: Path) -> dict[tuple[int, str | None, int], dict[str, Any]]:
    runs = json.loads((results / "tiny.json").read_text())["runs"]
    return {(r["seed"], r["codec"], r["restores"]): r for r in runs}


def test_raw_restores_and_runs_that_only_save_end_with_the_bits_of_the_uninterrupted_run(results: Path) -> None:
    runs = runs_of(results)
    alone = runs[0, None, 0]
    for codec, restores in (("raw", 1), ("raw", 0), ("int2", 0)):
        assert runs[0, codec, restores]["digest"] == alone["digest"]
        assert runs[0, codec, restores]["loss"] == alone["loss"]
    assert runs[0, "int2", 1]["digest"] != alone["digest"]


def test_a_result_is_made_in_pieces_that_add_what_it_lacks(results: Path) -> None:
    from accuracy import _missing, parse_arguments

    result = json.loads((results / "tiny.json").read_text())
    asked = ["--data", "rows", "--out", "result", "--seeds", "2", "--codecs", "raw", "int4", "--restores", "1", "3"]
    missing = list(_missing(parse_arguments(asked), result))
    assert missing[:3] == [(0, "int4", 1), (0, "raw", 3), (0, "int4", 3)]
    assert missing[3:] == [(1, None, 0), (1, "raw", 1), (1, "int4", 1), (1, "raw", 3), (1, "int4", 3)]


def test_errors_and_bytes_of_a_narrow_codec_are_what_they_should_be(results: Path) -> None:
    runs = runs_of(results)
    for kind in ("trained", "as drawn"):
        raw, narrow = (runs[0, codec, 1]["error"][kind] for codec in ("raw", "int2"))
        assert raw["off"] == 0
        assert 0.1 < narrow["off"] / narrow["norm"] < 0.4
        assert raw["rows"] == narrow["rows"] > 0
    assert runs[0, "int2", 1]["bytes"] < runs[0, "raw", 1]["bytes"]


def test_a_result_of_other_conditions_is_not_mixed_up_with_this_one(results: Path, tmp_path: Path) -> None:
    from accuracy import _opened

    with pytest.raises(ValueError, match="give another --out"):
        _opened(results / "tiny.json", {"train_rows": 3})
    assert _opened(tmp_path / "none.json", {"train_rows": 3})["runs"] == []


def test_the_page_and_its_plots_are_made_of_the_results(
    forks: ForkServerContext, results: Path, tmp_path: Path
) -> None:
    call(forks, BENCHMARKS / "accuracy_page.py", "--results", results, "--out", tmp_path / "accuracy.md")
    page = (tmp_path / "accuracy.md").read_text()
    assert "`raw`: 1 of 1 runs with restores end with the uninterrupted run's bits" in page
    assert "0 restores: 2 of 2 runs that save 20 times" in page
    assert "| 20 | `int4` | tiny | 0 | | | | | | not run |" in page
    for plot in ("changes", "errors"):
        assert (tmp_path / "plots" / f"accuracy-tiny-{plot}.svg").stat().st_size > 5000


def result_of(losses: dict[str, list[float]]) -> Any:
    from accuracy_figures import Result

    runs = [
        {"codec": None if codec == "alone" else codec, "restores": 0 if codec == "alone" else 1, "seed": seed,
         "loss": loss, "auc": 0.7, "digest": f"{codec}{seed}", "bytes": 1, "error": {}}
        for codec, of_seeds in losses.items() for seed, loss in enumerate(of_seeds)
    ]  # fmt: skip
    return Result({"conditions": {}, "machine": {}, "runs": runs})


def test_a_width_fails_where_it_is_worse_than_allowed_by_more_than_two_standard_errors() -> None:
    from accuracy_figures import judged

    alone = [0.5, 0.4, 0.6]
    for percents, fails in (([0.03, 0.031, 0.032], True), ([0.03, -0.01, 0.07], False), ([0.009, 0.009, 0.01], False)):
        result = result_of({"alone": alone, "int2": [a * (1 + p / 100) for a, p in zip(alone, percents, strict=True)]})
        change = result.change("int2", 1)
        assert change.loss.mean == pytest.approx(sum(percents) / 3)
        assert change.fails == fails
        assert judged([result])[1, "int2"] == (not fails)
        assert ((1, "int3") in judged([result])) == fails


def test_auto_picks_for_each_number_of_restores_the_first_width_that_fails_on_no_real_rows() -> None:
    from accuracy_figures import Result, judged

    from incremental_ckpt import AutoCodec

    files = sorted((BENCHMARKS / "results" / "accuracy").glob("criteo-*.json"))
    results = [Result(json.loads(path.read_text())) for path in files]
    assert len(results) == 2
    verdicts = judged(results)
    for restores, width in verdicts:
        for result in results:
            change = result.change(width, restores)
            assert change is not None
            assert change.loss.count >= 5
    picked = {restores: AutoCodec().codec_after(restores - 1) for restores, _ in verdicts}
    assert picked == {restores: width for (restores, width), serves in verdicts.items() if serves}
    assert {AutoCodec().codec_after(restores - 1) for restores in range(11, 1000)} == {picked[20]}
