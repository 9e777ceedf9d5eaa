"""Runs drawn at random that die at random writes until they reach their end, over any store.

It must not know which store it is; what a life is, and how its state is compared, is in lives.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lives import TINY, Script, live
from places import Open, Place
from small_runs import LAYOUTS, assert_same, truth

from incremental_ckpt import NotFoundError, Repository, Settings
from incremental_ckpt.compaction import compact
from incremental_ckpt.policy import KeepLast
from incremental_ckpt.pruning import prune
from incremental_ckpt.storage import Store
from incremental_ckpt.testing import Crash, CrashStore

LONGEST = 6
KINDS = ("full", "one-shot", "consecutive", "intermittent")
ALL_SETTINGS = (
    TINY,
    Settings(low_priority=False, read_threads=1),
    Settings(pack_bytes=2500, entry_bytes=1024, snapshot_bytes=1, preimage_bytes=900, low_priority=False),
    Settings(pack_bytes=4000, entry_bytes=512, stream=False, low_priority=False, read_threads=2),
)
MOST_LIVES = 400


@cache
def states_of(layout: str) -> Sequence[dict[str, Any]]:
    return truth(layout, LONGEST)


def draw_script(draw: random.Random) -> Script:
    steps = draw.randint(3, LONGEST)
    saves = {step: draw.choice(KINDS) for step in range(1, steps + 1) if draw.random() < 0.8}
    waits = frozenset(step for step in saves if draw.random() < 0.6)
    return Script(draw.choice(LAYOUTS), steps, saves or {1: "full"}, waits, draw.choice(ALL_SETTINGS))


@dataclass
class Outcome:
    """Of one run: how often it died, trainers and upkeep together."""

    trainers: int = 0
    upkeep: int = 0

    @property
    def deaths(self) -> int:
        return self.trainers + self.upkeep


def die_until_done(seed: int, open_again: Open) -> Outcome:
    """One run, from its first life on an empty store to its last. Raises AssertionError where anything is lost."""
    draw, outcome = random.Random(seed), Outcome()
    script = draw_script(draw)
    states = states_of(script.layout)
    tidies, ground = draw.random() < 0.3, 0
    for number in range(MOST_LIVES):
        # Ever longer lives: those that die too early to commit would never end.
        dying = CrashStore(open_again(), draw.randint(1, 12 + number), landed=draw.random() < 0.5)
        life = live(script, dying, states, seed=number + 1)
        if life.resumed is not None or life.acknowledged:  # else it died before it had resumed
            assert (life.resumed or 0) >= ground, "an acknowledged commit is lost"
        ground = max([ground, *life.acknowledged])
        assert_whole(open_again(), ground)
        if not dying.crashed:
            assert life.state is not None, "the run cannot go on"
            assert_same(life.state, states[script.steps])
            if not tidies:
                steps = [one.step for one in Repository(open_again()).checkpoints()]
                assert steps == sorted(script.saves), "a save was lost or made twice"
            return outcome
        outcome.trainers += 1
        if tidies and draw.random() < 0.4:
            outcome.upkeep += tidy(draw, open_again())
            assert_whole(open_again(), ground)
    raise AssertionError(f"the run of seed {seed} never ends")


def assert_whole(store: Store, ground: int) -> None:
    """I1, I3 and coverage of every visible checkpoint, every checksum included; the newest is not behind ``ground``."""
    repository = Repository(store)
    report = repository.check(deep=True)
    assert report.problems == ()
    newest = repository.newest()
    assert (0 if newest is None else newest.step) >= ground, "an acknowledged commit is lost"


def tidy(draw: random.Random, store: Store) -> bool:
    """A compaction or a prune that may die; whether it did."""
    dying = CrashStore(store, draw.choice((0, draw.randint(1, 6))), landed=draw.random() < 0.5)
    tools: tuple[Callable[[Repository], object], ...] = (
        compact,
        lambda repository: prune(repository, KeepLast(draw.randint(1, 2)), dry_run=False),
    )
    with suppress(Crash, NotFoundError):
        draw.choice(tools)(Repository(dying))
    return dying.crashed


def deaths_over(place: Place, scratch: Path, seeds: Iterator[int], wanted: int) -> Outcome:
    """Runs until at least ``wanted`` deaths. A failure names its seed."""
    total = Outcome()
    while total.deaths < wanted:
        seed = next(seeds)
        try:
            with place(scratch) as open_again:
                one = die_until_done(seed, open_again)
        except BaseException as error:
            error.add_note(f"seed {seed}: die_until_done({seed}, ...) repeats it")
            raise
        total = Outcome(total.trainers + one.trainers, total.upkeep + one.upkeep)
    return total
