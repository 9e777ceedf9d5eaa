"""The schedules of the protocol model, driven through the real code."""

from __future__ import annotations

from collections import Counter

import pytest
from budget import seeds
from driver import Mix, World, run

pytestmark = pytest.mark.usefixtures("scheduled")


def test_no_schedule_violates_an_invariant() -> None:
    count: Counter[str] = Counter()
    for seed in seeds(72):
        run(seed, count=count)
    met = ("commits", "base", "delta", "resumes", "fallbacks", "crashes", "conflicts", "reads", "damaged")
    assert not [what for what in met if count[what] < 5], f"the schedules do not meet all that they should: {dict(count)}"


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("seed", [1, 3])
def test_any_write_may_be_the_last_of_its_job(seed: int, landed: bool) -> None:
    die_at = 1
    while run(seed, die_at=die_at, landed=landed, events=140).writes >= die_at:
        die_at += 1
    assert die_at > 10


def test_a_seed_always_gives_the_same_run() -> None:
    assert run(2).log == run(2).log


def test_a_job_that_is_left_in_peace_commits_all_it_saves() -> None:
    mix = Mix(lost_answers=0.0, lost_commits=0.0, fates=(), stall=0.0, crash=0.0, reader=0.0)
    world: World = run(0, mix=mix)
    assert world.count["jobs"] == 1
    assert sorted(world.legit) == list(range(1, len(world.oracle) + 1))
    assert len(world.acknowledged) == len(world.oracle) > 5
