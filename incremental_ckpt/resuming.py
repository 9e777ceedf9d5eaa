"""One resume: pick a checkpoint, mark the resume, verify, load tables and state, fall back along the ancestors where
something is damaged.

It must not know trackers or saves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from incremental_ckpt.errors import CorruptionError, MismatchError, NotFoundError
from incremental_ckpt.format.manifest import Manifest
from incremental_ckpt.model import Field, ModelAdapter, Table
from incremental_ckpt.repository import Listing, Repository
from incremental_ckpt.restore import Found, compare_tables, find, load_state, load_tables
from incremental_ckpt.settings import Settings
from incremental_ckpt.surroundings import restore_rng

log = logging.getLogger("incremental_ckpt")

USER, RNG = "user", "rng"


@dataclass(frozen=True)
class Resumed:
    """What a resume did.

    Attributes:
        chain: manifests of the replayed chain, base first.
        newest: the newest checkpoint whose manifest is readable.
        newest_seq: the highest number, readable or not.
        complete: model and checkpoint have the same tables and parameters.
    """

    chain: tuple[Manifest, ...]
    newest: Manifest
    newest_seq: int
    complete: bool
    passed_over: tuple[tuple[int, str], ...]
    bytes: int
    seconds: float


class Resume:
    """Resumes of one job.

    Args:
        user_state: the caller's objects by name.
    """

    def __init__(
        self,
        repository: Repository,
        adapter: ModelAdapter,
        user_state: Mapping[str, Any],
        settings: Settings,
        *,
        job: str,
        rank: int,
        strict: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._repository = repository
        self._adapter = adapter
        self._user_state = user_state
        self._settings = settings
        self._job = job
        self._rank = rank
        self._strict = strict
        self._clock = clock
        self._markers = 0

    def run(self, step: int | None) -> Resumed | None:
        """Restore the checkpoint of a step, or the newest that is whole; None where the store holds none.

        Raises:
            NotFoundError: no checkpoint of that step.
            CorruptionError: it is damaged (or, without a step, all its ancestors are as well).
            MismatchError: model and checkpoint differ.
        """
        begun = self._clock()
        listing = self._repository.listing()
        if not listing.seqs:
            if step is not None:
                raise NotFoundError(f"{self._repository.store.url} holds no checkpoint, so none of step {step}")
            return None
        if step is not None:
            seq = self._repository.find(step).seq
            return self._resumed(seq, listing, (), begun)
        return self._newest_whole(listing, begun)

    def _newest_whole(self, listing: Listing, begun: float) -> Resumed:
        passed_over: list[tuple[int, str]] = []
        newest = listing.seqs[-1]
        candidates = iter(self._repository.fallbacks(newest, listing))
        seq = newest
        while True:
            try:
                return self._resumed(seq, listing, tuple(passed_over), begun)
            except CorruptionError as damage:
                log.warning("seq %d cannot be resumed and is passed over: %s", seq, damage)
                passed_over.append((seq, str(damage)))
                following = next(candidates, None)
                if following is None:
                    raise CorruptionError(
                        f"no checkpoint in {self._repository.store.url} can be resumed: seq {newest} is damaged "
                        f"({passed_over[0][1]}) and "
                        "none of its ancestors is whole. `ickpt check` lists what can be restored; "
                        "resume_from_checkpoint(step=...) takes it",
                        key=damage.key, expected=damage.expected, found=damage.found,
                    ) from damage  # fmt: skip
                seq = following.seq

    def _resumed(self, seq: int, listing: Listing, passed_over: tuple[tuple[int, str], ...], begun: float) -> Resumed:
        newest_seq = listing.seqs[-1]
        self._markers += 1
        self._repository.write_resume_marker(self._job, self._markers, seq=seq, newest=newest_seq)
        found, complete = self._repository.retried(lambda: self._load(seq))
        for passed, why in passed_over:
            log.warning("resumed seq %d instead of seq %d, which is damaged: %s", seq, passed, why)
        return Resumed(
            tuple(link.manifest for link in found.links), self._newest_readable(listing), newest_seq, complete,
            passed_over, found.bytes, self._clock() - begun,
        )  # fmt: skip

    def _newest_readable(self, listing: Listing) -> Manifest:
        for seq in reversed(listing.seqs):
            try:
                return self._repository.manifest(seq)
            except (CorruptionError, NotFoundError):
                continue
        raise AssertionError("the checkpoint that was just loaded is readable")

    def _load(self, seq: int) -> tuple[Found, bool]:
        found = find(self._repository, self._repository.links(seq))
        shards = found.shards()
        fields: dict[str, tuple[Field, ...]] = {name: parts[0].fields for name, parts in shards.items()}
        tables = self._adapter.prepare_restore(fields)
        differences = compare_tables(shards, tables, strict=self._strict)
        state = load_state(self._repository, found, self._rank)
        user = self._user_of(state, seq)
        differences += self._overlay(state)
        for difference in differences:
            log.warning("not strict: %s", difference)
        known: list[Table] = [t for t in tables if t.shard.table in shards]
        load_tables(self._repository, found, known, threads=self._settings.read_threads)
        rng = state.pop(RNG, None)
        self._adapter.load_state(state)
        for name, value in user.items():
            self._user_state[name].load_state_dict(value)
        if rng is not None:
            restore_rng(rng)  # last: loading may draw random numbers
        return found, not differences

    def _user_of(self, state: dict[str, Any], seq: int) -> dict[str, Any]:
        user: dict[str, Any] = state.pop(USER, {})
        missing, extra = self._user_state.keys() - user.keys(), user.keys() - self._user_state.keys()
        if self._strict and (missing or extra):
            lines = [f"{name!r} is registered and not in the checkpoint" for name in sorted(missing)]
            lines += [f"{name!r} is in the checkpoint and not registered" for name in sorted(extra)]
            raise MismatchError(
                f"state objects and seq {seq} differ: {'; '.join(lines)}. Register the same (state=...), or "
                "strict=False"
            )
        return {name: value for name, value in user.items() if name in self._user_state}

    def _overlay(self, state: dict[str, Any]) -> list[str]:
        """Not strict: what the checkpoint lacks stays as it is in the model, what the model lacks is left out."""
        if self._strict:
            return []
        differences: list[str] = []
        live = self._adapter.state()
        for name, current in live.items():
            if name in state and isinstance(current, Mapping) and isinstance(state[name], Mapping):
                for absent in current.keys() - state[name].keys():
                    differences.append(f"{name} {absent} is in the model and not in the checkpoint")
                for unknown in state[name].keys() - current.keys():
                    differences.append(f"{name} {unknown} is in the checkpoint and not in the model")
                state[name] = {k: state[name].get(k, v) for k, v in current.items()}
        return differences
