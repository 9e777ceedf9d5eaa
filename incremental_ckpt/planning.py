"""Which number, kind and parent the next save gets: rank 0's memory of its own job, corrected by what the store shows.

It must not know tables, devices or the other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from incremental_ckpt.codecs import AutoCodec
from incremental_ckpt.errors import ConflictError
from incremental_ckpt.format.layout import new_id
from incremental_ckpt.format.manifest import Lineage, Manifest, owner
from incremental_ckpt.model import CheckpointRef
from incremental_ckpt.persist import Verdict
from incremental_ckpt.policy import Chain, ChainLimit, KindPolicy, choose_kind
from incremental_ckpt.rank_writer import Attempt
from incremental_ckpt.repository import Repository
from incremental_ckpt.repository.lineage import lineage_after
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

    Args:
        limit: how long chains may grow.
        auto: chooses the weights' codec; None: it is the same in all checkpoints of the job.

    Attributes:
        lost: another job has gone on; this one can save no more.
    """

    def __init__(
        self,
        repository: Repository,
        job: str,
        environment: Mapping[str, Any],
        limit: ChainLimit,
        auto: AutoCodec | None = None,
    ) -> None:
        self.lost: ConflictError | None = None
        self._repository = repository
        self._job = job
        self._environment = environment
        self._lineage: tuple[Lineage, ...] | None = None
        self._newest_seq = 0
        self._attempts: set[str] = set()
        self._parent: CheckpointRef | None = None
        self._must_base = True
        self._unseen = False
        self._limit = limit
        self._shares: list[float] = []  # of the deltas that count from the present parent
        self._chains: dict[int, Chain] = {}
        self._auto = auto
        self._weight_codec: str | None = None

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
        self._attempts.clear()
        self._parent = source.ref if source else None
        # A branch starts with a base: a delta's parent would lie behind numbers of another branch, which prune may
        # drop.
        self._must_base = source is None or not complete or source.seq != newest_seq
        self._environment = {**self._environment, BY_RULE: list(notes)} if notes else self._environment
        self._shares = []  # deltas now count from the one that was resumed
        self._chains = {}
        for manifest in resumed:
            self._chains[manifest.seq] = self._chain_of(manifest)

    def begin_fresh(self, newest: Manifest | None) -> None:
        """Begin without a resume; what the store holds is left alone, and the numbers go on behind it."""
        if newest is not None:
            log.warning(
                "%s already holds checkpoints up to seq %d (step %d), and this job did not resume from them: it "
                "starts with a base of its own",
                self._repository.store.url, newest.seq, newest.step,
            )  # fmt: skip
            # Else, were our first manifest damaged, its predecessor would pass for an ancestor.
            self._repository.write_resume_marker(self._job, 0, seq=0, newest=newest.seq)
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
        chain = self._chains.get(self._parent.seq, Chain()) if self._parent is not None else Chain()
        choice = choose_kind(kind, self._shares, chain, self._limit)
        base = choice.base or self._must_base or self._parent is None
        assert self._lineage is not None
        attempt = new_id()
        self._attempts.add(attempt)
        return Attempt(
            seq=self._newest_seq + 1, attempt=attempt, kind="base" if base else "delta",
            parent=None if base else self._parent,
            next_parent=None if base or choice.moves_parent else self._parent,
            step=facts.step, epoch=facts.epoch, loss=facts.loss, metrics=facts.metrics,
            job=self._job, lineage=self._lineage, environment=self._environment,
            weight_codec=self._chosen_codec(self._auto) if self._auto is not None else None,
        )  # fmt: skip

    def _chosen_codec(self, auto: AutoCodec) -> str:
        assert self._lineage is not None
        behind = restores_behind(self._lineage, self._newest_seq + 1)
        chosen = auto.codec_after(behind)
        if chosen != self._weight_codec:
            log.info(
                "codec auto: weights are saved as %s%s (restores behind this run: %d, foreseen: %d)",
                chosen, "" if self._weight_codec is None else f" and no longer as {self._weight_codec}",
                behind, auto.foreseen,
            )  # fmt: skip
        self._weight_codec = chosen
        return chosen

    def chain_length(self, attempt: Attempt) -> int:
        """How many checkpoints a resume from it would replay."""
        return 1 if attempt.parent is None else self._chains.get(attempt.parent.seq, Chain()).length + 1

    def _chain_of(self, manifest: Manifest) -> Chain:
        size = manifest.totals.bytes
        if manifest.parent is None:
            return Chain(1, size)
        before = self._chains.get(manifest.parent.seq, Chain())
        return Chain(before.length + 1, before.bytes + size, size)

    def settle(self, attempt: Attempt, verdict: Verdict) -> None:
        """Take in how an attempt ended, and adopt what the store holds."""
        if isinstance(verdict.error, ConflictError):
            self.lost = verdict.error
        if verdict.committed is not None:
            totals = verdict.committed.totals
            if attempt.kind == "base":
                self._must_base = False
            if attempt.moves_parent:
                self._shares = []
            else:
                self._shares.append(totals.rows / max(1, totals.table_rows))
            self._chains[attempt.seq] = self._chain_of(verdict.committed)
        if verdict.must_base:
            self._must_base = True
        self._adopt(verdict.newest)
        self._unseen = not verdict.looked

    def _adopt(self, newest: Manifest | None) -> None:
        """The newest checkpoint of this job in the store says what comes next, also where it landed after we had given
        it up."""
        if newest is None or newest.seq <= self._newest_seq:
            return
        if newest.attempt not in self._attempts:
            # A put from before this process's last resume has landed: our history goes on behind it, as a branch.
            assert self._lineage is not None
            self._lineage = (*newest.lineage, Lineage(self._job, newest.seq + 1, self._lineage[-1].resumed))
            self._must_base = True
        self._attempts.clear()  # their number is taken: none of them can land any more
        self._newest_seq = newest.seq
        self._parent = newest.next_parent or newest.ref


def restores_behind(lineage: Sequence[Lineage], seq: int) -> int:
    """How often the state of a checkpoint has come out of a checkpoint. A resume that nothing was saved after is none:
    its state is gone."""
    restores = 0
    while seq:
        seq = owner(lineage, seq).resumed
        restores += seq > 0
    return restores


def as_base(attempt: Attempt) -> Attempt:
    return replace(attempt, kind="base", parent=None, next_parent=None)
