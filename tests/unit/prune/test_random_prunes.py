"""Whatever was saved, in which order it is pruned and compacted, and whatever the policies: what stays restores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import nan

from chains import Chain, Values, shard, some_rows, values
from hypothesis import given, settings
from hypothesis import strategies as st

from incremental_ckpt import Repository
from incremental_ckpt.compaction import compact
from incremental_ckpt.policy import Keep, KeepBest, KeepEvery, KeepLast
from incremental_ckpt.pruning import prune

USERS = shard("users", 24, 4)


@dataclass(frozen=True)
class Save:
    """kind: ``base``, ``consecutive`` or ``one-shot``."""

    kind: str
    codec: str
    metric: float


@dataclass(frozen=True)
class Compact:
    """Of the visible checkpoints, oldest first and round and round; -1: the newest."""

    which: int


@dataclass(frozen=True)
class Prune:
    keep: Sequence[Keep]


SAVES = st.builds(
    Save, st.sampled_from(["base", "one-shot", "consecutive"]), st.sampled_from(["raw", "int8", "int2"]),
    st.sampled_from([0.1, 0.5, nan]),
)  # fmt: skip
COMPACTS = st.builds(Compact, st.sampled_from([-1, -1, 0, 1, 2]))
KEEPS = st.one_of(
    st.builds(KeepLast, st.integers(1, 3)),
    st.builds(KeepBest, st.integers(1, 2), st.sampled_from(["m", "loss"]), st.sampled_from(["max", "min"])),
    st.builds(KeepEvery, st.integers(15, 60)),
)
PRUNES = st.builds(Prune, st.lists(KEEPS, min_size=1, max_size=3))
# A prune comes late, when there is something to forget.
ROUNDS = st.tuples(
    st.lists(SAVES, min_size=1, max_size=4), st.lists(st.one_of(SAVES, COMPACTS, PRUNES), max_size=3), PRUNES
).map(lambda parts: [*parts[0], *parts[1], parts[2]])


@dataclass
class Journey:
    """A store, and what is known of it without looking: what each checkpoint must read as, and what it is read from."""

    chain: Chain = field(default_factory=Chain)
    saved: dict[int, Values] = field(default_factory=dict)
    parents: dict[int, int | None] = field(default_factory=dict)
    visible: list[int] = field(default_factory=list)
    next_parent: int = 0
    forgotten: int = 0

    def save(self, deed: Save) -> None:
        base = deed.kind == "base" or not self.visible
        rows = range(USERS.rows) if base else some_rows(USERS, 0.3, self.chain.seq)
        self.chain.save(
            [[(USERS, rows)]], codec=deed.codec, kind="base" if base else "delta",
            moves_parent=base or deed.kind == "consecutive", metrics={"m": deed.metric},
        )  # fmt: skip
        seq = self.chain.seq
        self.visible.append(seq)
        self.parents[seq] = None if base else self.next_parent
        if base or deed.kind == "consecutive":
            self.next_parent = seq
        self.saved[seq] = values(self.chain.repository, seq)

    def compact(self, deed: Compact) -> None:
        if self.visible:
            seq = self.visible[deed.which % len(self.visible)]
            compact(self.reopened(), seq)
            self.parents[seq] = None

    def prune(self, deed: Prune) -> None:
        infos = self.reopened().checkpoints()
        wanted = {seq for policy in deed.keep for seq in policy.kept(infos)}
        stays = self.with_what_they_need(wanted | {self.visible[-1], self.next_parent} if self.visible else ())
        report = prune(self.reopened(), deed.keep, dry_run=False)
        assert report.failures == ()
        self.forgotten += len(report.forgotten)
        self.visible = [*self.reopened().listing().seqs]
        assert self.visible == sorted(stays)
        for seq in self.visible:
            assert values(self.reopened(), seq) == self.saved[seq]
        assert self.reopened().check(deep=True).problems == ()

    def with_what_they_need(self, seqs: Iterable[int]) -> set[int]:
        needed: set[int] = set()
        for seq in seqs:
            at: int | None = seq
            while at is not None:
                needed.add(at)
                at = self.parents[at]
        return needed

    def reopened(self) -> Repository:
        """As another process finds it."""
        return Repository(self.chain.repository.store)


def test_what_policies_keep_restores_and_the_rest_goes_whatever_the_saves_compactions_and_prunes_before() -> None:
    forgotten: list[int] = []

    @settings(max_examples=50, deadline=None, database=None)
    @given(st.lists(ROUNDS, min_size=1, max_size=4).map(lambda rounds: [deed for deeds in rounds for deed in deeds]))
    def holds(script: Sequence[Save | Compact | Prune]) -> None:
        journey = Journey()
        for deed in script:
            match deed:
                case Save():
                    journey.save(deed)
                case Compact():
                    journey.compact(deed)
                case Prune():
                    journey.prune(deed)
        forgotten.append(journey.forgotten)

    holds()
    assert sum(count > 0 for count in forgotten) > len(forgotten) / 2
