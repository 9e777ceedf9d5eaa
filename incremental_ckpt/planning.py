"""Which number, kind and parent the next save gets: rank 0's memory of its own job, corrected by what the store shows.

It must not know tables, devices or the other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from incremental_ckpt.errors import ConflictError
from incremental_ckpt.format.layout import new_id
from incremental_ckpt.format.manifest import Lineage, Manifest
from incremental_ckpt.model import CheckpointRef
from incremental_ckpt.persist import Verdict
from incremental_ckpt.policy import KindPolicy, choose_kind
from incremental_ckpt.rank_writer import Attempt
from incremental_ckpt.repository import Repository
from incremental_ckpt.repository.core import lineage_after, ref_of
from incremental_ckpt.surroundings import BY_RULE

log = logging.getLogger("incremental_ckpt")


@dataclass(frozen=True)
class Facts:
    """What the caller says of a save."""

    step: int
    epoch: int | None
    loss: float | None
    metrics: Mapping[str, float]


class Planner:
    """Plans the attempts of one job. Only rank 0's is asked.

    Attributes:
        lost: another job has gone on; this one can save no more.
    """

    def __init__(self, repository: Repository, job: str, environment: Mapping[str, Any]) -> None:
        self.lost: ConflictError | None = None
        self._repository = repository
        self._job = job
        self._environment = environment
        self._lineage: tuple[Lineage, ...] | None = None
        self._newest_seq = 0
        self._parent: CheckpointRef | None = None
        self._must_base = True
        self._unseen = False
        self._shares: list[float] = []
        self._chain_lengths: dict[int, int] = {}

    def begin_after(
        self,
        newest: Manifest | None,
        newest_seq: int,
        resumed: Sequence[Manifest],
        *,
        complete: bool,
        notes: Sequence[str] = (),
    ) -> None:
        """Start the job's own numbers.

        Args:
            newest: the newest readable checkpoint in the store.
            newest_seq: the highest number, readable or not.
            resumed: the chain that was replayed, base first; empty if nothing was resumed.
            complete: the model is exactly that checkpoint (strict), so that deltas may count from it.
            notes: what was put back by a rule instead; recorded with the checkpoints of this job.
        """
        source = resumed[-1] if resumed else None
        lineage = tuple(lineage_after(newest, self._job, source.seq if source else 0))
        self._lineage = (*lineage[:-1], Lineage(self._job, newest_seq + 1, lineage[-1].resumed))
        self._newest_seq = newest_seq
        self._parent = ref_of(source) if source else None
        # A branch starts with a base: a delta's parent would lie behind numbers of another branch, which prune may
        # drop.
        self._must_base = source is None or not complete or source.seq != newest_seq
        self._environment = {**self._environment, BY_RULE: list(notes)} if notes else self._environment
        deltas = [m for m in resumed if m.kind == "delta"]
        self._shares = [m.totals.rows / max(1, m.totals.table_rows) for m in deltas]
        self._chain_lengths = {m.seq: i + 1 for i, m in enumerate(resumed)}

    def begin_fresh(self, newest: Manifest | None) -> None:
        """Begin without a resume; what the store holds is left alone, and the numbers go on behind it."""
        if newest is not None:
            log.warning(
                "%s already holds checkpoints up to seq %d (step %d), and this job did not resume from them: it "
                "starts with a base of its own",
                self._repository.store.url, newest.seq, newest.step,
            )  # fmt: skip
        self.begin_after(newest, newest.seq if newest is not None else 0, (), complete=False)

    def must_start_over(self) -> None:
        """Rows may be about to change unmarked (a resume that may fail half-way): the next save is a base."""
        self._must_base = True

    def plan(self, facts: Facts, kind: KindPolicy) -> Attempt:
        """The next attempt.

        Raises:
            CheckpointError: the store has to be looked at first, and does not answer.
        """
        if self._lineage is None:
            self.begin_fresh(self._repository.newest())
        elif self._unseen:
            self._adopt(self._repository.newest_of(self._job, self._newest_seq))
            self._unseen = False
        choice = choose_kind(kind, self._shares)
        base = choice.base or self._must_base or self._parent is None
        assert self._lineage is not None
        return Attempt(
            seq=self._newest_seq + 1, attempt=new_id(), kind="base" if base else "delta",
            parent=None if base else self._parent,
            next_parent=None if base or choice.moves_parent else self._parent,
            step=facts.step, epoch=facts.epoch, loss=facts.loss, metrics=facts.metrics,
            job=self._job, lineage=self._lineage, environment=self._environment,
        )  # fmt: skip

    def chain_length(self, attempt: Attempt) -> int:
        """How many checkpoints a resume from it would replay."""
        return 1 if attempt.parent is None else self._chain_lengths.get(attempt.parent.seq, 1) + 1

    def settle(self, attempt: Attempt, verdict: Verdict) -> None:
        """Take in how an attempt ended, and adopt what the store holds."""
        if isinstance(verdict.error, ConflictError):
            self.lost = verdict.error
        if verdict.committed is not None:
            totals = verdict.committed.totals
            if attempt.kind == "base":
                self._must_base, self._shares = False, []
            else:
                self._shares.append(totals.rows / max(1, totals.table_rows))
            self._chain_lengths[attempt.seq] = self.chain_length(attempt)
        self._adopt(verdict.newest)
        self._unseen = not verdict.looked

    def _adopt(self, newest: Manifest | None) -> None:
        """The newest checkpoint of this job in the store says what comes next, also where it landed after we had given
        it up."""
        if newest is None or newest.seq <= self._newest_seq:
            return
        if newest.lineage != self._lineage:
            # A put from before this process's last resume has landed: our history goes on behind it, as a branch.
            assert self._lineage is not None
            self._lineage = (*newest.lineage, Lineage(self._job, newest.seq + 1, self._lineage[-1].resumed))
            self._must_base = True
        self._newest_seq = newest.seq
        self._parent = newest.next_parent or ref_of(newest)


def as_base(attempt: Attempt) -> Attempt:
    return replace(attempt, kind="base", parent=None, next_parent=None)
