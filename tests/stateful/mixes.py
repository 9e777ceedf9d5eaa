"""How likely things are in a run: drawn anew for each seed (swarm testing), or named for what some mistake needs.

They must not know how these things come about.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from incremental_ckpt.settings import Settings


@dataclass
class Mix:
    """How likely things are in one run; each seed has its own mixture (swarm testing)."""

    ranks: Sequence[int] = (1,)
    lost_answers: float = 0.02
    lost_commits: float = 0.06
    failed_reads: float = 0.0
    fates: Sequence[str] = ("now", "late", "late", "never")
    tries: int = 1
    stall: float = 0.004
    crash: float = 0.004
    late: float = 0.02
    reader: float = 0.004
    compact: float = 0.0
    prune: float = 0.0
    tool_speeds: Sequence[int] = (1, 3, 9)
    damage: float = 0.0
    damage_manifests: bool = False
    older: float = 0.3
    rival: float = 0.0
    resume_again: float = 0.0
    kinds: Sequence[str] = ("full", "consecutive", "consecutive", "one-shot", "one-shot", "intermittent")
    pauses_in_copies: bool = False
    settings: Settings = field(default_factory=Settings)

    @classmethod
    def drawn(cls, rng: random.Random, focus: int) -> Mix:
        mix = cls(
            ranks=rng.choice(((1,), (1,), (2,), (1, 2))),
            lost_answers=rng.choice((0.0, 0.01, 0.04, 0.15)),
            lost_commits=rng.choice((0.0, 0.05, 0.1, 0.3)),
            failed_reads=rng.choice((0.0, 0.0, 0.0, 0.02)),
            tries=rng.choice((1, 1, 2)),
            stall=0.004 * rng.choice((0, 1, 3)),
            crash=0.004 * rng.choice((0.3, 1, 2)),
            late=0.02 * rng.choice((0.3, 1, 3)),
            reader=0.01 * rng.choice((0, 0.5, 1)),
            kinds=rng.choice(
                (cls.kinds, ("full", "one-shot"), ("consecutive", "one-shot"), ("consecutive",), ("one-shot",))
            ),
            pauses_in_copies=rng.random() < 0.5,
            settings=Settings(
                pack_bytes=rng.choice((1, 128, 256, 1024)),
                entry_bytes=rng.choice((8, 8, 16, 64)),
                snapshot_bytes=rng.choice((1, 1 << 20, 1 << 20)),
                preimage_bytes=rng.choice((1, 48, 1 << 20, 1 << 20)),
                stream=rng.random() < 0.8,
                read_threads=1,
                vote_timeout=rng.choice((0.03, 0.3)),
                low_priority=False,
            ),
        )
        if focus == 0:
            mix.damage, mix.damage_manifests, mix.crash, mix.older = 0.06, rng.random() < 0.3, 0.01, 0.6
            mix.ranks, mix.lost_answers, mix.settings = (
                rng.choice(((1,), (1,), (2,))),
                0.01,
                replace(mix.settings, pack_bytes=1024),
            )
            mix.kinds = ("full", "full", "consecutive", "one-shot")
        if focus == 1:
            mix.crash, mix.rival = 0.012, 0.01
        if focus == 2:
            mix.stall, mix.lost_answers, mix.lost_commits = 0.02, 0.1, 0.3
        if focus == 3:
            mix.fates, mix.lost_answers, mix.late, mix.crash = ("late",), 0.1, 0.03, 0.001
            mix.lost_commits = 0.3
        if focus == 4:
            mix.resume_again, mix.lost_answers, mix.lost_commits, mix.fates = 0.3, 0.0, 0.3, ("late",)
            mix.ranks, mix.late = rng.choice(((1,), (1,), (2,))), 0.05
        if focus == 6:
            mix.compact, mix.prune, mix.crash = 0.015, 0.02, 0.008
        if focus == 7:
            mix.compact, mix.prune, mix.lost_commits, mix.stall = 0.02, 0.03, 0.2, 0.01
        return mix


ALONE = Mix(
    lost_answers=0.0,
    lost_commits=0.0,
    stall=0.0,
    crash=0.0,
    reader=0.0,
    settings=Settings(pack_bytes=4096, entry_bytes=8, read_threads=1, vote_timeout=0.3),
)
PAIRS = replace(ALONE, ranks=(2,), lost_answers=0.1)
LATE = replace(ALONE, lost_commits=0.4, fates=("late",), late=0.05)
BRANCHES = replace(ALONE, crash=0.02, older=0.8)
TOOLED = replace(ALONE, compact=0.03, prune=0.03, crash=0.01)
DAMAGED = replace(BRANCHES, damage=0.06, kinds=("full", "consecutive"))
