"""The protocol itself, without the library: its rules hold together, and none of them can be left out."""

from __future__ import annotations

import pytest
from budget import FACTOR, seeds
from protocol_model import MUTANTS, Violation, World, sweep

# Seeds whose runs need the rule. Without them the search below finds one, in minutes.
HINTS = {
    "branch_starts_with_base": 874,
    "next_parent_from_newest": 878,
    "own_late_put_is_ours": 138,
    "history_in_lineage": 160,
    "next_parent_kept": 71,
    "failed_base_gives_back": 48,
    "fallback_by_ancestors": 2430,
    "numbers_kept": 357,
}


def test_no_schedule_violates_an_invariant() -> None:
    count, violations = sweep(seeds(80))
    assert violations == []
    assert min(count[what] for what in ("commits", "prunes", "compactions", "reads", "retries")) > 20


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("landed", [False, True])
def test_any_write_may_be_the_last_of_its_actor(seed: int, landed: bool) -> None:
    die_at = 1
    while World(seed, die_at=die_at, landed=landed).run(250 if FACTOR == 1 else 600).writes >= die_at:
        die_at += 1
    assert die_at > 10


@pytest.mark.parametrize("mistake", MUTANTS)
def test_no_rule_can_be_left_out(mistake: str) -> None:
    hints = [HINTS[mistake]] if mistake in HINTS else []
    _, violations = sweep([*hints, *range(6000)], [mistake], first_only=True)
    assert violations, MUTANTS[mistake]


def test_a_violation_tells_the_schedule_that_led_to_it() -> None:
    world = World(0, ["old_values_until_copied"])
    with pytest.raises(Violation, match="I6"):
        world.run()
    assert any(line.startswith("create manifests/") for line in world.log)
