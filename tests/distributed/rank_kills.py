"""Kills the ranks of one training run hard, life after life at random moments, until it has died often enough.

It must not know how tables are sharded, nor what the digests should be.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rank_plans import Plan
from rank_processes import Group, Outcome, Raised, Ranks, Returned

STEPS = 10
KILLS = 2 * int(os.environ.get("ICKPT_SEARCH", "1"))
"""Deaths of each run; with ``ICKPT_SEARCH=20`` 20 times as many as in every run of the tests."""

SEED, OTHER_SEED = 1, 9
IMPATIENT = 1.0
"""Seconds that a rank waits for others which may be dead. A life that ends for them on a loaded machine counts as no
death."""


@dataclass(frozen=True)
class Job:
    """One training run, of any number of lives.

    Attributes:
        fused: the optimizer of the tables.
    """

    world_size: int
    plan: Plan
    fused: str
    store: Path

    def started(self, ranks: Ranks) -> Any:
        """A life that ends by itself, or is killed."""
        return ranks.started(self.world_size, *self._work(IMPATIENT))

    def finished(self, ranks: Ranks) -> list[tuple[str, int]]:
        """What the ranks of an undisturbed life return."""
        return ranks.run(self.world_size, *self._work())

    def _work(self, *timeout: float) -> Sequence[Any]:
        resumes = any(self.store.glob("manifests/*.json"))
        seed = OTHER_SEED if resumes else SEED  # what is not put back shows
        return ("rank_lives.train", str(self.store), self.plan, STEPS, seed, self.fused, *timeout)


@dataclass(frozen=True)
class Death:
    """When and whom to kill.

    Attributes:
        objects: what the life has added to the store before, unfinished files included; 0: it has just begun.
        seconds: then so long after.
        victim: the rank that dies first; None: all at once.
        survived: seconds after which the survivors are killed, as torchrun does; None: they are to find out themselves.
    """

    objects: int
    seconds: float
    victim: int | None
    survived: float | None


def draw(rng: random.Random, world_size: int, left: int, *, one: bool, to_the_end: bool) -> Death:
    """``left``: objects that the life would still write; ``one``: of the ranks; ``to_the_end``: the survivors notice by
    themselves, of a death within a save or after."""
    objects = rng.randint(1, max(1, left)) if to_the_end or rng.random() < 0.75 else 0
    seconds = rng.uniform(0, 0.05 if objects else 1.5)
    victim = rng.randrange(world_size) if one else None
    return Death(objects, seconds, victim, None if to_the_end else rng.uniform(0, 0.4))


def live_and_die(ranks: Ranks, job: Job, death: Death) -> list[Outcome] | None:
    """What became of the ranks that were not killed; None where all had finished before the moment."""
    there = objects_in(job.store)
    with job.started(ranks) as group:
        if not _reached(group, job.store, there + death.objects):
            return None
        time.sleep(death.seconds)
        if group.finished():
            return None
        if death.victim is None:
            group.kill()
            return []
        group.kill(death.victim)
        if death.survived is not None:
            time.sleep(death.survived)
            group.kill()
            return []
        return [outcome for rank, outcome in enumerate(group.outcomes(40)) if rank != death.victim]


def dies_and_ends_the_same(ranks: Ranks, job: Job) -> None:
    """Its digest after many deaths is that of a run that nobody has killed."""
    whole = replace(job, store=job.store.with_name("whole"))
    uninterrupted = whole.finished(ranks)
    assert len(set(uninterrupted)) == 1
    print(f"{die_often(ranks, job, uninterrupted[0][0], objects_in(whole.store))} deaths")


def die_often(ranks: Ranks, job: Job, digest: str, objects: int, kills: int = KILLS) -> int:
    """Let the job die so often, then finish it; a run that ends in between is begun anew.

    Args:
        digest, objects: those that a run leaves which nobody has killed.

    Returns:
        The deaths.
    """
    rng = random.Random(repr((job.world_size, job.plan, job.fused)))
    deaths = 0
    while deaths < kills:
        to_the_end = deaths == 0 and job.world_size > 1
        left = objects - objects_in(job.store)
        death = draw(rng, job.world_size, left, one=deaths % 2 == 0, to_the_end=to_the_end)
        survivors = live_and_die(ranks, job, death)
        if survivors is None:
            finish(ranks, job, digest)
            shutil.rmtree(job.store)
            continue
        deaths += 1
        # Who dies at the very end may have said its last word to the others before.
        assert all(isinstance(o, Raised) or (isinstance(o, Returned) and o.value[0] == digest) for o in survivors)
    finish(ranks, job, digest)
    return deaths


def finish(ranks: Ranks, job: Job, digest: str) -> None:
    ended = job.finished(ranks)
    assert [found for found, _ in ended] == [digest] * job.world_size
    assert len({step for _, step in ended}) == 1, "the ranks resumed at different steps"


def objects_in(store: Path) -> int:
    return sum(1 for path in store.rglob("*") if path.is_file()) if store.exists() else 0


def _reached(group: Group, store: Path, objects: int) -> bool:
    """Until the store holds so many; False where the ranks have finished before."""
    deadline = time.monotonic() + 60
    while objects_in(store) < objects:
        if group.finished() or time.monotonic() > deadline:
            return False
        time.sleep(0.004)
    return True
