"""The schedules of the protocol model, driven through the real code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from budget import seeds
from driver import World, run
from mixes import ALONE, DAMAGED

pytestmark = pytest.mark.usefixtures("scheduled")


def test_no_schedule_violates_an_invariant() -> None:
    count: Counter[str] = Counter()
    for seed in seeds(56):
        run(seed, count=count)
    met = ("base", "delta", "resumes", "resharded", "crashes", "conflicts", "reads", "damaged", "compactions", "prunes")
    assert all(count[what] > 1 for what in met), f"the schedules do not meet all that they should: {dict(count)}"


def test_a_damaged_checkpoint_gives_way_to_a_true_ancestor() -> None:
    count: Counter[str] = Counter()
    for seed in seeds(16):
        run(seed, mix=replace(DAMAGED), count=count)
    assert count["fallbacks"] > 1


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("seed", [1, 3])
def test_any_write_may_be_the_last_of_its_job(seed: int, landed: bool) -> None:
    die_at = 1
    while run(seed, die_at=die_at, landed=landed, events=100).writes >= die_at:
        die_at += 1
    assert die_at > 10


def test_a_seed_always_gives_the_same_run() -> None:
    assert run(2).log == run(2).log


def test_a_job_that_is_left_in_peace_commits_all_it_saves() -> None:
    world: World = run(0, mix=replace(ALONE))
    assert world.count["jobs"] == 1
    assert sorted(world.legit) == list(range(1, len(world.oracle) + 1))
    assert len(world.acknowledged) == len(world.oracle) > 5
