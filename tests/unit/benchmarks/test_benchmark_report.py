from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from report import page
from rows import Row, Target, ratio_row
from timing import rounds_of


def result_of(*rows: Row) -> dict[str, Any]:
    conditions = {"commit": "abc", "versions": {"torch": "2"}, "memory_bytes": 8_000_000, "share": 0.02}
    return {"created": "2026-01-31", "conditions": conditions, "rows": [row.as_json() for row in rows]}


SLOW = Row("stall", "delta / gather", 2.5, (2.4, 2.6), 7, Target("at most", 2.0), {"stall_seconds": 0.0215})
QUICK = replace(SLOW, ratio=1.5, quartiles=(1.4, 1.6))


def test_a_missed_target_is_said_first_and_in_its_row() -> None:
    text = page({"this-machine": result_of(SLOW)})
    assert "0 of 1 targets reached" in text
    assert "- missed: delta / gather: 2.500, at most 2" in text
    assert "| delta / gather | 2.500 | 2.400 – 2.600 | 7 | at most 2 | **no** |" in text


def test_a_reached_target_is_no_miss() -> None:
    text = page({"this-machine": result_of(QUICK)})
    assert "1 of 1 targets reached" in text
    assert "missed" not in text
    assert "| at most 2 | yes |" in text


def test_a_figure_without_a_target_counts_for_none() -> None:
    assert "0 of 0 targets reached" in page({"this-machine": result_of(replace(SLOW, target=None))})


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
