"""One resume: pick a checkpoint, mark the resume, verify, load tables and state, fall back along the ancestors where
something is damaged.

It must not know trackers or saves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from incremental_ckpt.agreement import Report, check_same_call, first_error, make_error, written_error
from incremental_ckpt.coordinator import Coordinator
from incremental_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    MismatchError,
    NotFoundError,
    StorageError,
)
from incremental_ckpt.format.manifest import Manifest
from incremental_ckpt.model import Difference, Field, ModelAdapter, Shard, Table
from incremental_ckpt.repository import Listing, Repository
from incremental_ckpt.restore import Found, compare_tables, find, load_state, load_tables
from incremental_ckpt.settings import Settings
from incremental_ckpt.surroundings import restore_rng, why_rng_does_not_fit

log = logging.getLogger("incremental_ckpt")

USER, RNG, SCHEDULE = "user", "rng", "schedule"
_SHOWN = 100
"""Differences that an error names."""

_PASSES = 12
"""How often a prune or a compaction may overtake one resume."""


@dataclass(frozen=True)
class Resumed:
    """What a resume did.

    Attributes:
        chain: manifests of the replayed chain, base first.
        newest: the newest checkpoint whose manifest is readable (on rank 0; elsewhere the one resumed).
        newest_seq: the highest number, readable or not.
        complete: model and checkpoint have the same tables and parameters.
        notes: what was put back by a rule instead of bit for bit, a line each.
        schedule: what the run had measured of its own saves; empty where it had not.
    """

    chain: tuple[Manifest, ...]
    newest: Manifest
    newest_seq: int
    complete: bool
    passed_over: tuple[tuple[int, str], ...]
    bytes: int
    seconds: float
    notes: tuple[str, ...]
    schedule: Mapping[str, Any]


class Resume:
    """Resumes of one job on one rank. Rank 0 picks the checkpoint; all ranks load it, or all go on to the next.

    Args:
        user_state: the caller's objects by name.
    """

    def __init__(
        self,
        repository: Repository,
        adapter: ModelAdapter,
        user_state: Mapping[str, Any],
        settings: Settings,
        coordinator: Coordinator,
        *,
        job: str,
        tables_elsewhere: Collection[str] = (),
        strict: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._repository = repository
        self._adapter = adapter
        self._user_state = user_state
        self._settings = settings
        self._coordinator = coordinator
        self._job = job
        self._tables_elsewhere = tables_elsewhere
        self._strict = strict
        self._clock = clock
        self._markers = 0

    def run(self, step: int | None) -> Resumed | None:
        """Restore the checkpoint of a step, or the newest that is whole; None where the store holds none.

        Raises:
            NotFoundError: no checkpoint of that step.
            CorruptionError: it is damaged (or, without a step, all its ancestors are as well).
            MismatchError: model and checkpoint differ.
            FormatError: a newer version wrote it. Where that is so of a compaction only, the chain that it stands for
                is resumed.
            StorageError: the store does not answer, or compactions and prunes overtook every pass.
        """
        begun = self._clock()
        candidates = self._candidates(step) if self._coordinator.rank == 0 else None
        passed_over: list[tuple[int, str]] = []
        damage: CorruptionError | None = None
        newer: FormatError | None = None
        while True:
            pick = self._agreed_pick(step, candidates)
            if pick is not None and pick.first:
                # What was tried before is not damaged: a prune or a compaction has passed meanwhile.
                passed_over.clear()
                damage = newer = None
            if newer is not None and (pick is None or pick.bases is None):
                # An upgrade brings this one back: no older one is taken for it.
                raise FormatError(f"{newer}. Without it {self._repository.store.url} has no whole chain") from newer
            if pick is None:
                if damage is not None and step is not None:
                    raise damage
                if damage is not None:
                    raise self._nothing_whole(passed_over, damage) from damage
                self._agree_that_it_is_empty(step)
                return None
            loaded: _Loaded | None = None
            failure: Exception | None = None
            try:
                self._check_that_it_is_shared(pick.seq)
                loaded = self._repository.retried(partial(self._load, pick))
            except Exception as cause:  # whatever it is, the other ranks are to hear of it
                failure = cause
            reports = self._told(step, loaded, failure)
            found = self._agreed_failure(failure, reports)
            if found is None:
                break
            log.warning("seq %d cannot be resumed%s: %s", pick.seq, _way(pick, newer), found)
            if pick.bases is None:
                passed_over.append((pick.seq, str(found)))
            if isinstance(found, FormatError):
                newer = newer or found
            elif pick.bases is None:
                damage = found
        assert loaded is not None
        # What one rank has put back by a rule is no state that anybody's delta may count from.
        complete = all(r["complete"] for r in reports)
        notes = tuple(dict.fromkeys(note for r in reports for note in r["notes"]))
        if pick.bases is not None:
            log.warning("resumed seq %d%s: the next save is a base", pick.seq, _way(pick, newer))
            passed_over.pop()
            complete = False  # no delta may count from what others still read through the damage
        for passed, why in passed_over:
            log.warning("resumed seq %d instead of seq %d, which is damaged: %s", pick.seq, passed, why)
        for note in notes:
            log.warning("not bit for bit: %s", note)
        chain = tuple(link.manifest for link in loaded.found.links)
        return Resumed(
            chain, pick.newest or chain[-1], pick.newest_seq, complete,
            tuple(passed_over), loaded.found.bytes, self._clock() - begun, notes, loaded.schedule,
        )  # fmt: skip

    def _check_that_it_is_shared(self, seq: int) -> None:
        """Manifests are never deleted (I4), so every rank finds what rank 0 has found."""
        if self._coordinator.rank == 0:
            return
        try:
            self._repository.manifest(seq)
        except NotFoundError as cause:
            raise NotFoundError(
                f"rank {self._coordinator.rank} finds no seq {seq} in {self._repository.store.url}, and rank 0 has "
                "found it. Do all ranks see the same store? A local path is not shared between machines"
            ) from cause

    def _agree_that_it_is_empty(self, step: int | None) -> None:
        """Raises NotFoundError on every rank where another one than rank 0 finds checkpoints: they see different
        stores, and this would be a silent cold start."""
        if self._coordinator.world_size == 1:
            return
        newest = max(report["newest"] for report in self._newest_seen(step))
        if not newest or self._newest_seen(step)[0]["newest"]:
            return  # or another job has begun meanwhile: the first commit tells this one
        raise NotFoundError(
            f"other ranks find checkpoints up to seq {newest}, and rank 0 finds none. Rank {self._coordinator.rank} "
            f"looks into {self._repository.store.url}. Do all ranks see the same store? A local path is not shared "
            "between machines"
        )

    def _newest_seen(self, step: int | None) -> Sequence[Report]:
        report: Report = {"what": "empty", "step": step, "error": None, "newest": 0}
        failure: CheckpointError | None = None
        try:
            report["newest"] = max(self._repository.listing().seqs, default=0)
        except CheckpointError as cause:
            failure = cause
            report["error"] = written_error(cause)
        reports = self._coordinator.meet(report)
        check_same_call(reports)
        if (error := failure or first_error(reports, self._coordinator.rank)) is not None:
            raise error
        return reports

    def _nothing_whole(self, passed_over: Sequence[tuple[int, str]], damage: CorruptionError) -> CorruptionError:
        newest, why = passed_over[0]
        return CorruptionError(
            f"no checkpoint in {self._repository.store.url} can be resumed: seq {newest} is damaged ({why}) and none "
            "of its "
            "ancestors is whole. `ickpt check` lists what can be restored; resume_from_checkpoint(step=...) takes it",
            key=damage.key, expected=damage.expected, found=damage.found,
        )  # fmt: skip

    def _candidates(self, step: int | None) -> Iterator[_Pick]:
        """What rank 0 picks, best first. Each is marked in the store before anything of it is read."""
        for _ in range(_PASSES):
            listing = self._repository.listing()
            if not listing.seqs:
                if step is not None:
                    raise NotFoundError(f"{self._repository.store.url} holds no checkpoint, so none of step {step}")
                return
            for pick in self._picks(step, listing):
                yield pick
                now = self._repository.listing()
                if (now.gone, now.bases) != (listing.gone, listing.bases):
                    break  # a prune or a compaction has passed: what could not be read may be what it took
            else:
                return
        raise StorageError(
            f"{_PASSES} times a compaction or a prune of {self._repository.store.url} has passed while this resume was "
            "reading. Resume again; end what compacts and prunes there until then",
            retryable=True,
        )

    def _picks(self, step: int | None, listing: Listing) -> Iterator[_Pick]:
        """Those of one pass, as a listing shows them: of each checkpoint all ways that it can be read."""
        first = True
        for seq in self._seqs(step, listing):
            below = sorted(base for base in listing.bases if base <= seq)
            for bases in (None, *(tuple(below[:count]) for count in reversed(range(len(below))))):
                yield replace(self._marked(seq, listing, first=first), bases=bases)
                first = False

    def _seqs(self, step: int | None, listing: Listing) -> Iterator[int]:
        if step is not None:
            yield self._repository.find(step).seq
            return
        yield listing.seqs[-1]
        for manifest in self._repository.fallbacks(listing.seqs[-1], listing):
            yield manifest.seq

    def _marked(self, seq: int, listing: Listing, *, first: bool) -> _Pick:
        self._markers += 1
        self._repository.write_resume_marker(self._job, self._markers, seq=seq, newest=listing.seqs[-1])
        return _Pick(seq, listing.seqs[-1], first, self._newest_readable(listing))

    def _newest_readable(self, listing: Listing) -> Manifest | None:
        for seq in reversed(listing.seqs):
            try:
                return self._repository.manifest(seq)
            except (CorruptionError, NotFoundError):
                continue
        return None

    def _agreed_pick(self, step: int | None, candidates: Iterator[_Pick] | None) -> _Pick | None:
        """Rank 0's next candidate, on every rank."""
        report: Report = {"what": "resume", "step": step, "error": None, "pick": None}
        pick: _Pick | None = None
        failure: CheckpointError | None = None
        if candidates is not None:
            try:
                pick = next(candidates, None)
                report["pick"] = [pick.seq, pick.newest_seq, pick.first, pick.bases] if pick is not None else None
            except CheckpointError as cause:
                failure = cause
                report["error"] = written_error(cause)
        reports = self._coordinator.meet(report)
        check_same_call(reports)
        if (error := first_error(reports, self._coordinator.rank)) is not None:
            raise failure or error
        if self._coordinator.rank == 0 or reports[0]["pick"] is None:
            return pick
        seq, newest_seq, first, bases = reports[0]["pick"]
        return _Pick(seq, newest_seq, first, None, None if bases is None else tuple(bases))

    def _told(self, step: int | None, loaded: _Loaded | None, failure: Exception | None) -> Sequence[Report]:
        report: Report = {"what": "loaded", "step": step, "error": written_error(failure)}
        if loaded is not None:
            report |= {"complete": loaded.complete, "notes": loaded.notes}
        reports = self._coordinator.meet(report)
        check_same_call(reports)
        return reports

    def _agreed_failure(
        self, failure: Exception | None, reports: Sequence[Report]
    ) -> CorruptionError | FormatError | None:
        """None where every rank has loaded; what is in the way where all are to try the next candidate.

        Raises:
            Exception: on every rank, what no other candidate would help with.
        """
        error = first_error(reports, self._coordinator.rank)
        if error is None:
            return None
        told = [r["error"] for r in reports if r["error"] is not None]
        others = [each for each in told if each[0] not in (CorruptionError.__name__, FormatError.__name__)]
        if others and isinstance(failure or error, CorruptionError | FormatError):
            raise make_error(*others[0])
        if others:
            raise failure or error
        newer = next((each for each in told if each[0] == FormatError.__name__), None)
        found = failure or error if newer is None else make_error(*newer)
        assert isinstance(found, CorruptionError | FormatError)
        return found

    def _load(self, pick: _Pick) -> _Loaded:
        seq = pick.seq
        readable = None if pick.bases is None else Listing((), frozenset(), frozenset(pick.bases))
        links = self._repository.links(seq, readable)
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        found = find(self._repository, links, self._adapter.tables(), rank=rank, world_size=world_size)
        shards = found.shards()
        fields = {name: _whole_fields(parts[0]) for name, parts in shards.items()}
        state = load_state(self._repository, found)
        differences = self._accepted_differences(links[-1].manifest, shards, fields, state)
        user = {name: value for name, value in state.pop(USER, {}).items() if name in self._user_state}
        tables = self._adapter.prepare_restore(fields, state)
        known: list[Table] = [t for t in tables if t.shard.table in shards]
        notes = load_tables(self._repository, found, known, threads=self._settings.read_threads)
        complete = not notes  # a mean is another state than the one that deltas would count from
        notes = sorted(set(notes))
        if not found.same_ranks:
            saved = len(found.links[-1].manifest.ranks)
            notes.append(
                f"seq {seq} was saved by {saved} ranks, and there are {world_size} now: random generators, buffers and "
                f"registered objects of a rank are those of rank (rank modulo {saved}) then"
            )
        rng, schedule = state.pop(RNG, None), state.pop(SCHEDULE, {})
        self._adapter.load_state(state)
        for name, value in user.items():
            self._user_state[name].load_state_dict(value)
        if rng is not None:
            restore_rng(rng)  # last: loading may draw random numbers
        for difference in differences:
            log.warning("not strict: %s", difference.text)
        return _Loaded(found, complete and not differences, notes, schedule)

    def _accepted_differences(
        self,
        manifest: Manifest,
        shards: Mapping[str, Sequence[Shard]],
        fields: Mapping[str, Sequence[Field]],
        state: Mapping[str, Any],
    ) -> list[Difference]:
        """What model and checkpoint do not have in common, where that is no error; before anything is changed.

        Raises:
            MismatchError: all that they may not differ in.
        """
        found = compare_tables(shards, self._adapter.tables(), elsewhere=self._tables_elsewhere)
        if not any(d.fatal for d in found):
            found += self._adapter.differences(fields, state)
        user = state.get(USER, {}).keys()
        for name in sorted(self._user_state.keys() - user):
            found.append(Difference(f"state object {name!r} is registered (state=...) and not in the checkpoint"))
        for name in sorted(user - self._user_state.keys()):
            found.append(Difference(f"state object {name!r} is in the checkpoint and not registered (state=...)"))
        if (why := why_rng_does_not_fit(state.get(RNG) or {})) is not None:
            found.append(Difference(why, fatal=True))
        refused = [d for d in found if self._strict or d.fatal]
        if refused:
            way_out = "" if any(d.fatal for d in refused) else "\nstrict=False loads what both have"
            more = f"\n  and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
            raise MismatchError(
                f"the model and seq {manifest.seq} (step {manifest.step}) in {self._repository.store.url} differ; "
                "nothing was changed:\n  " + "\n  ".join(d.text for d in refused[:_SHOWN]) + more + way_out
            )
        return found


def _whole_fields(shard: Shard) -> tuple[Field, ...]:
    """The fields that the whole table would have."""
    return tuple(replace(f, width=shard.table_cols) if f.width == shard.cols else f for f in shard.fields)


@dataclass(frozen=True)
class _Loaded:
    """What this rank has put back.

    Attributes:
        complete: it is exactly what the checkpoint holds, and all of it.
        notes: what was put back by a rule, a line each.
    """

    found: Found
    complete: bool
    notes: list[str]
    schedule: Mapping[str, Any]


@dataclass(frozen=True)
class _Pick:
    """A checkpoint to try.

    Attributes:
        newest_seq, newest: the newest there is, and the newest whose manifest can be read.
        first: of a pass over all candidates.
        bases: which equivalent bases may be read, where one of them is damaged; None: all.
    """

    seq: int
    newest_seq: int
    first: bool
    newest: Manifest | None
    bases: tuple[int, ...] | None = None


def _way(pick: _Pick, newer: FormatError | None) -> str:
    if pick.bases is None:
        return ""
    what = "a damaged compaction" if newer is None else "a compaction of a newer version"
    return f" from the chain that {what} (.base.json) stands for"
