"""Runs drawn at random that die at random writes until they reach their end, over any store.

It must not know which store it is; what a life is, and how its state is compared, is in lives.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from lives import TINY, Script, live
from places import Open, Place
from scant_runs import ScantRun, scant_truth
from small_runs import LAYOUTS, assert_same
from watch import Watch

from incremental_ckpt import NotFoundError, Repository, Settings
from incremental_ckpt.compaction import compact
from incremental_ckpt.format import layout
from incremental_ckpt.policy import KeepLast
from incremental_ckpt.pruning import prune
from incremental_ckpt.storage import Store
from incremental_ckpt.testing import Crash, CrashStore, FaultStore, fail
from incremental_ckpt.testing.stores import WRITES, Op, Perform

LONGEST = 6
KINDS = ("full", "one-shot", "consecutive", "consecutive", "intermittent")
ALL_SETTINGS = (
    TINY,
    Settings(low_priority=False, read_threads=1),
    Settings(pack_bytes=6000, entry_bytes=1024, snapshot_bytes=1, preimage_bytes=900, low_priority=False),
    Settings(pack_bytes=8000, entry_bytes=512, stream=False, low_priority=False, read_threads=2),
)
MOST_LIVES = 400
TIDIES_AT_THE_END = 8

Deaths = Counter[str]
"""How often who died at what: see ``Fate.kind``."""


def draw_script(draw: random.Random) -> Script:
    steps = draw.randint(3, LONGEST)
    saves = {step: draw.choice(KINDS) for step in range(1, steps + 1) if draw.random() < 0.8}
    waits = frozenset(step for step in saves if draw.random() < 0.6)
    return Script(draw.choice(LAYOUTS), steps, saves or {1: "full"}, waits, draw.choice(ALL_SETTINGS), ScantRun)


class Fate:
    """What befalls a process over a store: it dies at its ``die_at``-th write, if it ever comes to it.

    Attributes:
        store: as the process sees it.
    """

    def __init__(self, inner: Store, die_at: int, landed: bool) -> None:
        self._dying = CrashStore(inner, die_at, landed)
        self._die_at = die_at
        self._landed = landed
        self._writes = count(1)
        self._last: Op | None = None
        self.store = FaultStore(self._dying, self._remember)

    @property
    def died(self) -> bool:
        return self._dying.crashed

    def stumble(self, prefix: str, at: int, landed: bool) -> None:
        """The ``at``-th write below a prefix gets no answer, and the process lives on."""
        writes = count(1)

        def there(op: Op) -> bool:
            return op.kind in WRITES and op.key.startswith(prefix) and next(writes) == at

        self.store.inject(fail(there, landed=landed))

    def kind(self, who: str) -> str:
        """Who died, at which object of the format, and whether it landed. Of writes at one moment it may be another."""
        assert self.died
        assert self._last is not None
        parsed = layout.parse_key(self._last.key)
        assert parsed is not None, f"{self._last} is no object of the format"
        verb = "deleting" if self._last.kind == "delete" else "writing"
        return f"{who}, {verb} {parsed.what}, {'landed' if self._landed else 'lost'}"

    def _remember(self, op: Op, perform: Perform) -> Any:
        if op.kind in WRITES and next(self._writes) == self._die_at:
            self._last = op
        return perform(op)


def die_until_done(seed: int, open_again: Open) -> Deaths:
    """One run, from its first life on an empty store to its last. Raises AssertionError where anything is lost."""
    draw, deaths = random.Random(seed), Deaths()
    script = draw_script(draw)
    states = scant_truth(script.layout, LONGEST)
    watch = Watch(open_again)
    tidies, ground = draw.random() < 0.5, 0
    failed: set[int] = set()
    for number in range(MOST_LIVES):
        # Ever longer lives: those that die too early to commit would never end.
        fate = Fate(open_again(), draw.randint(1, draw.choice((5, 10)) + number // 2), landed=draw.random() < 0.5)
        if draw.random() < 0.5:
            place, latest = draw.choice(((layout.DATA, 5), (layout.MANIFESTS, 2)))
            fate.stumble(place, draw.randint(1, latest), landed=draw.random() < 0.5)
        life = live(script, fate.store, states, seed=number + 1)
        if life.resumed is not None or life.acknowledged:  # else it died before it had resumed
            assert (life.resumed or 0) >= ground, "an acknowledged commit is lost"
        ground = max([ground, *life.acknowledged])
        failed.update(life.failed)
        watch.assert_whole(ground)
        if not fate.died:
            break
        deaths[fate.kind("training")] += 1
        while tidies and draw.random() < 0.5:
            deaths += tidy(draw, open_again())
            watch.assert_whole(ground)
    else:
        raise AssertionError(f"the run of seed {seed} never ends")
    assert life.state is not None, "the run cannot go on"
    assert_same(life.state, states[script.steps])
    if not tidies:
        steps = [one.step for one in Repository(open_again()).checkpoints()]
        assert steps == sorted(set(steps)), "a save that failed was made, or one was made twice"
        assert set(steps) <= script.saves.keys() <= failed.union(steps), "a save was lost"
    for _ in range(TIDIES_AT_THE_END):
        deaths += tidy(draw, open_again())
        watch.assert_whole(ground)
    heir = live(script, open_again(), states, seed=MOST_LIVES)
    assert (heir.resumed or 0) >= ground
    assert heir.state is not None, "the run cannot go on"
    assert_same(heir.state, states[script.steps])
    watch.assert_whole(ground)
    watch.assert_nothing_changed()
    return deaths


def tidy(draw: random.Random, store: Store) -> Deaths:
    """A compaction or a prune that may die."""
    tools: Mapping[str, Callable[[Repository], object]] = {
        "compaction": compact,
        "prune": lambda repository: prune(repository, KeepLast(draw.randint(1, 2)), dry_run=False),
    }
    fate = Fate(store, draw.choice((0, 1, 2, 3, draw.randint(4, 12))), landed=draw.random() < 0.5)
    who = draw.choice([*tools])
    with suppress(Crash, NotFoundError):
        tools[who](Repository(fate.store))
    return Deaths([fate.kind(who)] if fate.died else [])


def deaths_over(place: Place, scratch: Path, seeds: Iterator[int], wanted: int) -> Deaths:
    """Runs until at least ``wanted`` deaths. A failure names its seed."""
    deaths = Deaths()
    while deaths.total() < wanted:
        seed = next(seeds)
        try:
            with place(scratch) as open_again:
                deaths += die_until_done(seed, open_again)
        except BaseException as error:
            error.add_note(f"seed {seed}: die_until_done({seed}, ...) repeats it")
            raise
    return deaths
