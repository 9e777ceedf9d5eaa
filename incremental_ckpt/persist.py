"""The background half of a save: encode, write packs, vote, commit, tell the outcome, look at what the store now holds.

It must not know models, trackers or devices, and runs no collective: ranks meet in the store only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from incremental_ckpt.codecs import Codec, codec_named
from incremental_ckpt.errors import CheckpointError, ConflictError, NotFoundError, SaveError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import (
    Manifest,
    Outcome,
    Totals,
    VoteFacts,
)
from incremental_ckpt.model import WEIGHT
from incremental_ckpt.rank_writer import Attempt, Ballot, Content, RankWriter, ballot_of
from incremental_ckpt.repository import Repository
from incremental_ckpt.repository.foundation import Foundation
from incremental_ckpt.settings import Settings

log = logging.getLogger("incremental_ckpt")


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended.

    Attributes:
        committed: the manifest, if this attempt committed.
        error: what went wrong otherwise.
        newest: the newest checkpoint of this job in the store, as the look after the attempt showed it; None where
            there is none.
        looked: whether the look succeeded; if not, the next attempt looks first.
        must_base: what deltas count from is gone: only a base can be resumed.
    """

    committed: Manifest | None
    error: CheckpointError | None
    newest: Manifest | None
    looked: bool
    must_base: bool = False


_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1
"""Between two looks for what another rank writes, in seconds."""

UNDECIDED = Verdict(None, None, None, False)
"""This rank does not know; rank 0 tells at the next meeting."""


class Persister:
    """Carries attempts out, one after another.

    Args:
        codecs: by ``weight`` and ``optimizer``; an attempt may name another one for weights.
    """

    def __init__(
        self,
        repository: Repository,
        codecs: Mapping[str, Codec],
        settings: Settings,
        *,
        rank: int = 0,
        world_size: int = 1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._repository = repository
        self._codecs = codecs
        self._settings = settings
        self._rank = rank
        self._world_size = world_size
        self._clock = clock
        self._sleep = sleep
        self._now = now
        self._foundation = Foundation(repository)

    def persist(self, attempt: Attempt, content: Content, interrupt: threading.Event) -> Verdict:
        """Write, vote and (rank 0) commit. Never raises a CheckpointError: the verdict says what went wrong.

        Args:
            interrupt: set where the outcome is known otherwise; what is not written yet is not written any more.
        """
        writer = RankWriter(
            self._repository, attempt, content.tables, self._codecs_of(attempt),
            rank=self._rank, world_size=self._world_size,
        )  # fmt: skip
        error: CheckpointError | None = None
        mine: Ballot | None = None
        may_report = False
        self._foundation.missing = None  # that of the attempt before
        try:
            try:
                if self._rank == 0:
                    self._warn_of_a_lost_repo_file(attempt)
                self._repository.create()  # on every rank: no object may come before repo.json
                may_report = True
                if self._rank == 0:
                    self._check_foundation(attempt)
                for packful, overriding in content.packfuls:
                    writer.add_rows(packful, overriding=overriding)
                    if interrupt.is_set():
                        return UNDECIDED
                state = writer.add_state(content.state, self._settings.pack_bytes)
            finally:
                content.end()
            may_report = False  # a vote whose answer is lost may stand: there is no second one (I2)
            mine = writer.vote(state)
        except Exception as cause:  # whatever it is, it fails this save and no other
            error = _save_error(attempt, cause)
            if may_report:
                self._report_failure(writer, cause)
        if self._rank == 0:
            return self._decide(attempt, mine, error)
        return self._await_outcome(attempt, error, interrupt)

    def _warn_of_a_lost_repo_file(self, attempt: Attempt) -> None:
        if self._repository.has_lost_repo_file():
            log.warning(
                "%s has lost its %s under the run, which the save of step %d makes again: does somebody delete what "
                "lies there? Checkpoints may be lost as well (`ickpt check` tells)",
                self._repository.store.url, layout.REPO, attempt.step,
            )  # fmt: skip

    def _check_foundation(self, attempt: Attempt) -> None:
        """Raises SaveError where the base that a delta would count from is gone: nobody could resume the delta."""
        if attempt.parent is not None and (missing := self._foundation.missing_below(attempt.parent)) is not None:
            raise self._foundation_lost(attempt, missing, "committed nothing")

    def _foundation_lost(self, attempt: Attempt, missing: str, outcome: str) -> SaveError:
        assert attempt.parent is not None
        return SaveError(
            f"save of step {attempt.step} (seq {attempt.seq}) {outcome}: what it counts from has gone from "
            f"{self._repository.store.url}, or can be read no more, since seq {attempt.parent.seq} was saved or "
            f"resumed ({missing}). Find out what takes it away (a cleaner of old files, a lifecycle rule, another "
            "job). The next save is a base and stands alone"
        )

    def _codecs_of(self, attempt: Attempt) -> Mapping[str, Codec]:
        named = attempt.weight_codec
        return self._codecs if named is None else {**self._codecs, WEIGHT: codec_named(named)}

    def _report_failure(self, writer: RankWriter, cause: Exception) -> None:
        if self._world_size == 1:
            return
        try:
            writer.vote_failed(cause)
        except Exception:  # noqa: S110
            pass  # the store is what failed: rank 0 misses the vote and its timeout ends the attempt

    def _decide(self, attempt: Attempt, mine: Ballot | None, error: CheckpointError | None) -> Verdict:
        committed: Manifest | None = None
        if error is None and mine is not None:
            try:
                ballots = [mine, *self._await_votes(attempt)]
                committed = self._repository.commit(self._manifest(attempt, ballots))
            except Exception as failure:
                error = failure if isinstance(failure, (SaveError, ConflictError)) else _save_error(attempt, failure)
        verdict = self._look(attempt, committed, error)
        if self._world_size > 1:
            self._tell(attempt, verdict)
        return verdict

    def _manifest(self, attempt: Attempt, ballots: Sequence[Ballot]) -> Manifest:
        totals = Totals(sum(b.rows for b in ballots), sum(b.table_rows for b in ballots), sum(b.bytes for b in ballots))
        return Manifest(
            seq=attempt.seq, step=attempt.step, epoch=attempt.epoch, loss=attempt.loss, metrics=dict(attempt.metrics),
            kind=attempt.kind, parent=attempt.parent, next_parent=attempt.next_parent,
            job=attempt.job, attempt=attempt.attempt, lineage=tuple(attempt.lineage), created=self._now(),
            world_size=self._world_size, ranks=tuple(b.ref for b in ballots), totals=totals,
            environment=attempt.environment,
        )  # fmt: skip

    def _await_votes(self, attempt: Attempt) -> list[Ballot]:
        """Those of all other ranks, in order. A failed one ends the waiting, whoever is still missing."""
        keys = {
            layout.rank_manifest_key(attempt.seq, attempt.attempt, rank): rank for rank in range(1, self._world_size)
        }
        ballots: dict[int, Ballot] = {}
        deadline = self._clock() + self._settings.vote_timeout
        pause = _SHORTEST_PAUSE
        while len(ballots) < len(keys):
            # One listing shows who has voted; asking for each vote would be a request for every rank in every round.
            prefix = layout.attempt_prefix(attempt.seq, attempt.attempt)
            for key in sorted(keys.keys() & {o.key for o in self._repository.store.list(prefix)}):
                if keys[key] not in ballots:
                    ballots[keys[key]] = self._vote_of(attempt, keys[key], key)
                    pause = _SHORTEST_PAUSE
            if len(ballots) < len(keys):
                if self._clock() > deadline:
                    raise SaveError(self._no_votes(attempt, [r for r in keys.values() if r not in ballots]))
                self._sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE)
        return [ballots[rank] for rank in sorted(ballots)]

    def _vote_of(self, attempt: Attempt, rank: int, key: str) -> Ballot:
        raw = bytes(self._repository.store.get(key))
        vote = VoteFacts.from_bytes(raw, key)
        if vote.vote != "ok":
            raise SaveError(
                f"save of step {attempt.step} failed on rank {rank}: {vote.error}. Its rows go into the next save"
            )
        return ballot_of(vote, raw)

    def _no_votes(self, attempt: Attempt, missing: Sequence[int]) -> str:
        ranks = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
        return (
            f"{ranks} not voted on seq {attempt.seq} (step {attempt.step}) within {self._settings.vote_timeout:g} s: "
            f"rank 0 finds no vote in its store ({self._repository.store.url}). Are they alive, and do all ranks write "
            "to this very store?"
        )

    def _await_object(self, key: str, missing: str, interrupt: threading.Event) -> bytes | None:
        """The object as soon as it is there; None once interrupted."""
        deadline = self._clock() + self._settings.vote_timeout
        pause = _SHORTEST_PAUSE
        while True:
            try:
                return bytes(self._repository.store.get(key))
            except NotFoundError:
                if interrupt.is_set():
                    return None
                if self._clock() > deadline:
                    raise SaveError(
                        f"{missing} within {self._settings.vote_timeout:g} s. Is it alive, and does it write to the "
                        f"same store ({self._repository.store.url})?"
                    ) from None
            self._sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _look(self, attempt: Attempt, committed: Manifest | None, error: CheckpointError | None) -> Verdict:
        """What the store holds now decides what the next attempt counts from, not what this one believes."""
        lost = attempt.parent is not None and self._foundation.missing is not None
        try:
            listing = self._repository.listing(self._first_of_chain(attempt) - 1)
            newest = self._repository.newest() if lost else self._repository.newest_in(listing, attempt.seq - 1)
        except Exception:  # whatever a store raises, what has been committed is
            return Verdict(committed, error, committed, committed is not None, lost)
        if newest is not None and newest.attempt == attempt.attempt:
            # The answer was lost, or the put landed after we had given it up: it is committed all the same.
            if attempt.parent is not None and (missing := self._foundation.missing_in(listing)) is not None:
                outcome = "is written and cannot be resumed"
                return Verdict(None, self._foundation_lost(attempt, missing, outcome), newest, True, must_base=True)
            return Verdict(newest, None, newest, True)
        if newest is not None and newest.job not in self._jobs_that_may_hold(newest.seq, attempt):
            # Also where a late put of our own holds this number: another job has gone on behind it.
            if committed is None:
                error = self._repository.lost_to(newest, attempt.job)
            newest = None
        return Verdict(committed, error, newest or committed, True, lost)

    @staticmethod
    def _jobs_that_may_hold(seq: int, attempt: Attempt) -> set[str]:
        """From the attempt's number on no other job than its own; below it those behind it as well."""
        return {attempt.job} if seq >= attempt.seq else {entry.job for entry in attempt.lineage}

    def _first_of_chain(self, attempt: Attempt) -> int:
        """From which number on a listing shows all that the attempt stands on."""
        return attempt.seq if attempt.parent is None else min((*self._foundation.chain, attempt.seq))

    def _tell(self, attempt: Attempt, verdict: Verdict) -> None:
        if not self._repository.exists:
            return  # nothing may come before repo.json, and that is what has failed
        outcome = Outcome(attempt.seq, attempt.attempt, verdict.committed is not None, str(verdict.error or ""))
        try:
            self._repository.store.put(layout.outcome_key(attempt.seq, attempt.attempt), [outcome.to_bytes()])
        except Exception:  # noqa: S110
            pass  # the others time out, and the next meeting tells them

    def _await_outcome(self, attempt: Attempt, error: CheckpointError | None, interrupt: threading.Event) -> Verdict:
        key = layout.outcome_key(attempt.seq, attempt.attempt)
        missing = f"rank 0 has not told the outcome of seq {attempt.seq} (step {attempt.step})"
        try:
            raw = self._await_object(key, missing, interrupt)
            if raw is None:
                return UNDECIDED
            outcome = Outcome.from_bytes(raw, key)
            if outcome.committed:
                committed = self._repository.manifest(attempt.seq)
                return Verdict(committed, None, committed, True)
        except CheckpointError as failure:
            return Verdict(None, error or _save_error(attempt, failure), None, False)
        return Verdict(None, error or SaveError(outcome.error), None, False)


def _save_error(attempt: Attempt, cause: Exception) -> CheckpointError:
    if isinstance(cause, SaveError):
        return cause
    error = SaveError(
        f"save of step {attempt.step} (seq {attempt.seq}) failed and committed nothing: {cause}. Its rows stay marked "
        "and go into the next save"
    )
    error.__cause__ = cause
    return error
