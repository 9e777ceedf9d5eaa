from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import report
from aims import AIMS
from report import page, read_results
from rows import Row, Target, ratio_row
from timing import rounds_of


def result_of(*rows: Row) -> dict[str, Any]:
    conditions = {"commit": "abc", "versions": {"torch": "2"}, "memory_bytes": 8_000_000, "share": 0.02}
    return {"created": "2026-01-31", "conditions": conditions, "rows": [row.as_json() for row in rows]}


SLOW = Row("stall", "delta / gather", 2.5, (2.4, 2.6), 7, Target("at most", 2.0), {"stall_seconds": 0.0215})
QUICK = replace(SLOW, ratio=1.5, quartiles=(1.4, 1.6))


def test_a_missed_target_is_counted_and_said_in_its_row() -> None:
    text = page({"this-machine": result_of(SLOW)})
    assert "0 of 1 targets reached" in text
    assert "| delta / gather | 2.500 | 2.400 – 2.600 | 7 | at most 2 | **no** |" in text


def test_a_reached_target_is_no_miss() -> None:
    text = page({"this-machine": result_of(QUICK)})
    assert "1 of 1 targets reached" in text
    assert "| at most 2 | yes |" in text


def test_a_figure_without_a_target_counts_for_none() -> None:
    text = page({"this-machine": result_of(replace(SLOW, target=None), QUICK)})
    assert "1 of 1 targets reached" in text
    assert "| delta / gather | 2.500 | 2.400 – 2.600 | 7 |  |  |" in text


def test_details_and_conditions_have_units() -> None:
    text = page({"this-machine": result_of(SLOW)})
    assert "stall 21.50 ms" in text
    assert "| memory | 8.0 MB |" in text
    assert "| share | 2.00% |" in text
    assert "| versions | torch 2 |" in text


def test_phases_are_shown_with_their_times() -> None:
    phase = Row(
        "stall, by phase (a pass of its own)", "scan the marks", 0.4, (0.3, 0.5), 7, None, {"phase_seconds": 0.005}
    )
    assert "| scan the marks | 5.00 ms | 0.400 | 0.300 – 0.500 |" in page({"this-machine": result_of(phase)})


def test_without_results_the_page_says_so() -> None:
    assert "There are no results yet." in page({})


AIMED = replace(SLOW, what="save_checkpoint of a delta / bare index_select of its rows")


def test_every_aim_has_a_line_at_the_top_measured_or_not() -> None:
    targets = page({"save-here": result_of(AIMED)}).partition("## Targets")[2].partition("## Saving")[0]
    assert targets.count("not measured") == len(AIMS) - 1
    assert (
        "| stall of a raw delta / bare gather | 2.500 | at most 2 | **no** | [Saving (here)](#saving-here) |" in targets
    )


def test_a_missed_aim_comes_with_its_reason_and_a_reached_one_without() -> None:
    missed = page({"save-here": result_of(AIMED)})
    assert "- stall of a raw delta / bare gather: the scan of one byte per row comes on top" in missed
    assert "Missed, and why" not in page({"save-here": result_of(replace(AIMED, ratio=1.5))})


def test_any_result_has_a_heading_known_or_not() -> None:
    text = page({"matrix-growth-here": result_of(QUICK), "something-new": result_of(QUICK)})
    assert "## By the size of the model (here)" in text
    assert "## something-new" in text


def kind_row(kind: str, codec: str, share: float, bases: int = 0) -> Row:
    details = {
        "kind": kind, "codec": codec, "wanted_share": share, "bases": bases, "intervals": 4, "full_bytes": 1000,
        "written_in_all_bytes": 400 if codec == "raw" else 100, "stored_bytes": 1400,
    }  # fmt: skip
    return Row("bytes by kind", f"{kind}, {codec}: full / written", 10.0, (10.0, 10.0), 1, None, details)


def test_kinds_are_lines_and_shares_are_columns() -> None:
    rows = [kind_row("one-shot", "int8", 0.02), kind_row("one-shot", "int8", 0.26, bases=3)]
    text = page({"matrix-kinds": result_of(*rows)})
    assert "| kind | codec | 2.0% changed | 26.0% changed |" in text
    assert "| one-shot | int8 | 10.0 | 10.0 (3) |" in text


def share_rows(share: float) -> list[Row]:
    stall = {"share": share, "stall_seconds": share, "bare_seconds": share / 2}
    seconds = {**stall, "durable_seconds": 9 * share, "write_seconds": share}
    return [replace(SLOW, measure=measure, details=seconds) for measure in ("stall by share", "time to durable")]


def growth_row(rows: int) -> Row:
    seconds = {"stall_seconds": 0.02, "bare_seconds": 0.01, "scan_seconds": 0.005, "durable_seconds": 0.2}
    return replace(SLOW, measure="growth with rows", details={"table_rows": rows, "rows": 200, **seconds})


def other_row(measure: str) -> Row:
    seconds = {"checkpointer": "torch.save", "stall_seconds": 2.0, "durable_seconds": 2.0}
    return replace(SLOW, measure=measure, what="torch.save / a delta of ours", details=seconds)


def test_figures_are_drawn_of_what_there_is_with_titles_and_units(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    results = {
        "matrix-shares": [*share_rows(0.02), *share_rows(0.26)],
        "matrix-growth": [growth_row(1_000_000), growth_row(10_000_000)],
        "matrix-kinds": [kind_row(kind, codec, 0.26) for kind in ("full", "one-shot") for codec in ("raw", "int8")],
        "matrix-others": [other_row(f"other checkpointers, {what}") for what in ("stall", "time to durable")],
    }
    for name, rows in results.items():
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(result_of(*rows)))
    arguments = ["--results", str(tmp_path / "results"), "--out", str(tmp_path / "page.md")]
    assert report.main(arguments) == 0
    drawn = {name: (tmp_path / "plots" / name).read_text() for name in ("stall.svg", "bytes.svg", "growth.svg")}
    for name, words in {
        "stall.svg": ["bare index_select", "torch.save", "Time to durable", "rows changed", " ms"],
        "bytes.svg": ["26.0% changed", "one-shot", "int8", "written per interval", " %"],
        "growth.svg": ["scanning the marks", "rows of the model", "milliseconds", "10M"],
    }.items():
        ElementTree.fromstring(drawn[name])
        for word in words:
            assert word in drawn[name], (name, word)
        assert f"](plots/{name})" in (tmp_path / "page.md").read_text()
    assert report.main(arguments) == 0
    assert (tmp_path / "plots" / "stall.svg").read_text() == drawn["stall.svg"], "the same results, the same file"
    (tmp_path / "results" / "matrix-shares.json").unlink()
    assert report.main(arguments) == 0
    assert not (tmp_path / "plots" / "stall.svg").exists()
    assert "plots/stall.svg" not in (tmp_path / "page.md").read_text()


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("[]")
    with pytest.raises(ValueError, match=r"odd\.json is no result"):
        read_results(tmp_path)


@pytest.mark.parametrize(("bound", "reached"), [("at most", [True, True, False]), ("at least", [False, True, True])])
def test_the_target_itself_is_within_the_target(bound: Any, reached: list[bool]) -> None:
    assert [Target(bound, 2.0).reached_by(ratio) for ratio in (1.9, 2.0, 2.1)] == reached


def test_a_row_is_the_median_of_the_ratios_of_pairs() -> None:
    row = ratio_row("m", "w", [(1, 1), (20, 10), (9, 3), (40, 10), (5, 1)])
    assert (row.ratio, row.quartiles, row.repeats) == (3.0, (2.0, 4.0), 5)


def test_peers_have_their_turns_round_by_round() -> None:
    turns = iter("abcdef")
    rounds = rounds_of(lambda: (next(turns), next(turns)), 3, 1.0, clock=lambda: 0.0)
    assert rounds == [("a", "b"), ("c", "d"), ("e", "f")]


def test_the_budget_ends_the_rounds_but_not_before_the_second() -> None:
    ticks = iter(range(100))
    assert rounds_of(lambda: 7, 50, 2.5, clock=lambda: float(next(ticks))) == [7, 7, 7, 7]
    assert len(rounds_of(lambda: None, 50, 0.0, clock=lambda: 1.0)) == 2
    assert len(rounds_of(lambda: None, 1, 0.0, clock=lambda: 1.0)) == 1
