"""Forgets checkpoints that nobody needs any more and deletes what belongs to none: a plan first, then its execution.

It must not know models, ranks or threads, and must not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from incremental_ckpt.arguments import REPOSITORY, Progress, an, flag, policies, progress_function
from incremental_ckpt.errors import CorruptionError, FormatError, NotFoundError, StorageError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Gone, Manifest
from incremental_ckpt.policy import Keep, kept_by_any
from incremental_ckpt.repository import Listing, Repository
from incremental_ckpt.repository.foundation import missing_of

log = logging.getLogger("incremental_ckpt")

_PASSES = 3
_PACK = ".safetensors"


@dataclass(frozen=True)
class Removal:
    """Objects that lie together and go together.

    Attributes:
        seq: the checkpoint that they were written for.
        prefix: what their keys begin with.
        keys: in the order of deletion: what names others goes first.
        why: ``forgotten``: nothing needs the checkpoint any more; ``orphan``: no manifest names them.
    """

    seq: int
    prefix: str
    keys: tuple[str, ...]
    bytes: int
    why: str


@dataclass(frozen=True)
class PrunePlan:
    """What a prune is going to do.

    Attributes:
        kept: visible checkpoints that stay, ascending.
        wanted: those of them that retention asks for.
        needed: others that these are read from.
        in_use: others that stay whatever retention asks for: the newest, what the next delta and live jobs count from,
            and what these are read from. What else is kept is damaged, and might be mended.
        forgotten: visible checkpoints that go, ascending.
        damaged: visible checkpoints that retention does not count since they cannot be restored.
        equivalents: manifests of equivalent bases that go.
        removals: data that goes, by seq.
        newer: numbers whose equivalent base a newer version wrote. What it needs cannot be told: it stays with all data
            of its number, and so do the visible ones that may be read from it, with all that they need by themselves.
    """

    kept: tuple[int, ...]
    wanted: tuple[int, ...]
    needed: tuple[int, ...]
    in_use: tuple[int, ...]
    forgotten: tuple[int, ...]
    damaged: tuple[int, ...]
    equivalents: tuple[tuple[int, str], ...]
    removals: tuple[Removal, ...]
    newer: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(removal.bytes for removal in self.removals)

    @property
    def orphan_bytes(self) -> int:
        return sum(removal.bytes for removal in self.removals if removal.why == "orphan")


@dataclass(frozen=True)
class PruneReport:
    """What a prune did.

    Attributes:
        executed: False for a dry run: then nothing below happened.
        forgotten: checkpoints that are not visible any more because of it.
        bytes_freed: of data that is deleted, temporary files included.
        failures: what could not be done, a line each. It is tried again by the next prune.
    """

    plan: PrunePlan
    executed: bool
    forgotten: tuple[int, ...] = ()
    bytes_freed: int = 0
    failures: tuple[str, ...] = ()


def prune(
    repository: Repository,
    keep: Keep | Sequence[Keep],
    *,
    dry_run: bool = True,
    progress: Progress | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> PruneReport:
    """Forget the checkpoints that no policy keeps, and delete their data and that of dead attempts.

    Kept besides are the newest checkpoint, the one that the next delta counts from, those that a live job resumed
    from, and whatever these need. It may run while a trainer saves, a compaction runs and others read.

    Args:
        keep: what to keep: a policy, or several, of which one is enough.
        dry_run: plan only.
        progress: called with the bytes that are dealt with, deleted or not, and with those of all removals; never by
            a dry run.

    Raises:
        CorruptionError: a manifest or a resume marker that decides what is needed cannot be read. Nothing was touched.
        StorageError: the store does not answer to the plan; failures to delete are in the report instead.
        ValueError, TypeError: no policy at all, or an argument is not what it should be.
    """
    an(Repository, "repository", repository, REPOSITORY)
    given = policies("keep", keep, "kept", "KeepLast(3)", least=1)
    flag("dry_run", dry_run)
    progress = progress_function(progress)
    plan = _plan(repository, given)
    return PruneReport(plan, False) if dry_run else _execute(repository, plan, progress, now)


def _plan(repository: Repository, policies: Sequence[Keep]) -> PrunePlan:
    for _ in range(_PASSES):
        survey = _Survey(repository)
        plan = survey.plan(policies)
        if not plan.damaged or survey.is_current():
            break
        # Another prune or a compaction has passed: what seems damaged may be what it took.
    return plan


class _Survey:
    """What is in the store, listed in the order that makes the plan safe: manifests, then markers, then data.

    Data that appears after the listing of the manifests belongs to a later number or is named by one that is kept.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._listing: Listing = repository.listing()
        self._manifests: dict[int, Manifest | None] = {}
        self._equivalents: dict[int, Manifest | None] = {}
        self._newer: set[int] = set()
        self._markers = repository.resume_markers() if self._listing.seqs else []
        self._attempts: dict[tuple[int, str], dict[str, int]] = {}
        self._whole: dict[int, bool] = {}
        for stored in repository.store.list(layout.DATA):
            parsed = layout.parse_key(stored.key)
            if parsed is not None:
                self._attempts.setdefault((parsed.seq, parsed.attempt), {})[stored.key] = stored.size

    def plan(self, policies: Sequence[Keep]) -> PrunePlan:
        seqs = self._listing.seqs
        if not seqs:
            return PrunePlan((), (), (), (), (), (), (), ())
        newest = self._manifest(seqs[-1])
        if newest is None:
            raise CorruptionError(
                f"the manifest of the newest checkpoint, seq {seqs[-1]} in {self._repository.store.url}, cannot be "
                "read, so nobody can tell what it needs. Restore it from a copy, or prune after the next save",
                key=layout.manifest_key(seqs[-1]), expected="a manifest", found="a damaged one",
            )  # fmt: skip
        for seq in self._listing.bases:
            self._equivalent(seq)
        whole = [seq for seq in seqs if self._is_whole(seq)]
        damaged = tuple(seq for seq in seqs if not self._whole[seq])
        infos = [manifest.info() for seq in whole if (manifest := self._manifest(seq)) is not None]
        wanted = kept_by_any(policies, infos)
        used = {newest.seq}
        if newest.next_parent is not None:
            used.add(newest.next_parent.seq)
        # A marker is outlived once a number above the newest that it saw exists.
        used |= {marker.seq for marker in self._markers if seqs[-1] <= marker.newest}
        # Damage may be mended from a copy: what is not older than all that retention keeps stays.
        oldest = min(wanted | {newest.seq})
        read, in_use = self._closure(wanted), self._closure(used)
        may_be_mended = {s for s in damaged if s > oldest}
        may_be_whole = {s for s in seqs if s in self._newer or (not self._whole[s] and self._may_stand_on_newer(s))}
        needed = read | in_use | self._closure(may_be_mended | may_be_whole, of_damaged=True)
        forgotten = tuple(seq for seq in seqs if seq not in needed)
        return PrunePlan(
            kept=tuple(seq for seq in seqs if seq in needed),
            wanted=tuple(sorted(wanted)),
            needed=tuple(seq for seq in seqs if seq in read - wanted),
            in_use=tuple(seq for seq in seqs if seq in in_use - read),
            forgotten=forgotten,
            damaged=damaged,
            equivalents=tuple((s, layout.base_key(s)) for s in sorted(self._listing.bases) if self._drops(s, needed)),
            removals=tuple(self._removals(needed)),
            newer=tuple(sorted(self._newer)),
        )

    def is_current(self) -> bool:
        now = self._repository.listing()
        return (now.gone, now.bases) == (self._listing.gone, self._listing.bases)

    def _drops(self, seq: int, needed: set[int]) -> bool:
        """Whether nothing of this number is needed. One that is neither visible nor gone came after the listing."""
        if seq in needed or seq in self._newer:
            return False
        return seq in self._listing.gone or seq in self._listing.seqs

    def _manifest(self, seq: int) -> Manifest | None:
        """The manifest of a number, gone or not; None where it is damaged. It is never deleted, so it is there."""
        if seq not in self._manifests:
            try:
                self._manifests[seq] = self._repository.manifest(seq)
            except (CorruptionError, NotFoundError) as damage:
                log.warning("seq %d cannot be read: %s", seq, damage)
                self._manifests[seq] = None
        return self._manifests[seq]

    def _equivalent(self, seq: int) -> Manifest | None:
        """The equivalent base of a number, if it is one and all that belongs to it is there."""
        if seq not in self._equivalents:
            found: Manifest | None = None
            own = self._manifest(seq)
            if seq in self._listing.bases and own is not None:
                try:
                    found = self._repository.equivalent(own)
                except CorruptionError as damage:
                    log.warning("the equivalent base of seq %d is ignored: %s", seq, damage)
                except FormatError as newer:
                    log.warning("the equivalent base of seq %d is left as it is: %s", seq, newer)
                    self._newer.add(seq)
            self._equivalents[seq] = found if found is not None and self._is_there(found) else None
        return self._equivalents[seq]

    def _is_there(self, manifest: Manifest) -> bool:
        """Whether its rank manifests are there, and packs of the sizes that it counts in sum."""
        return missing_of(manifest, self._attempts) is None

    def _is_whole(self, seq: int) -> bool:
        """Whether all that belongs to the chain is there, as far as a listing tells. `check` looks closer."""
        path: list[int] = []
        while seq not in self._whole:
            path.append(seq)
            manifest = self._manifest(seq)
            if manifest is None or not self._is_there(manifest):
                self._whole[seq] = False
            elif manifest.parent is None or self._equivalent(seq) is not None:
                self._whole[seq] = True
            else:
                seq = manifest.parent.seq
        found = self._whole[seq]
        for passed in path:
            self._whole.setdefault(passed, found)
        return found

    def _may_stand_on_newer(self, seq: int) -> bool:
        """Whether an equivalent base by a newer version stands on the way down from here."""
        while seq not in self._newer:
            manifest = self._manifest(seq)
            if manifest is None or manifest.parent is None:
                return False
            seq = manifest.parent.seq
        return True

    def _closure(self, seqs: Iterable[int], *, of_damaged: bool = False) -> set[int]:
        """These and what they are read from: parents, down to a base or an equivalent one.

        Raises:
            CorruptionError: a manifest cannot be read, so that nobody can tell (unless they are known to be damaged).
        """
        needed: set[int] = set()
        todo = list(seqs)
        while todo:
            seq = todo.pop()
            if seq in needed:
                continue
            needed.add(seq)
            manifest = self._manifest(seq)
            if manifest is None:
                if of_damaged:
                    continue
                raise CorruptionError(
                    f"the manifest of seq {seq} in {self._repository.store.url} cannot be read, and a checkpoint that "
                    "is to be kept needs it. Restore it from a copy; `ickpt check` tells what can be restored",
                    key=layout.manifest_key(seq), expected="a manifest", found="a damaged one",
                )  # fmt: skip
            if manifest.parent is not None and self._equivalent(seq) is None:
                todo.append(manifest.parent.seq)
        return needed

    def _removals(self, needed: set[int]) -> Iterable[Removal]:
        for (seq, attempt), objects in sorted(self._attempts.items()):
            if seq in needed:
                if not self._is_orphan(seq, attempt):
                    continue
                why = "orphan"
            elif self._drops(seq, needed):
                why = "forgotten"
            else:
                continue  # above all numbers that were listed: perhaps an attempt that is being made
            # Rank manifests name packs, so they go first.
            keys = sorted(objects, key=lambda key: (key.endswith(_PACK), key))
            yield Removal(seq, layout.attempt_prefix(seq, attempt), tuple(keys), sum(objects.values()), why)

    def _is_orphan(self, seq: int, attempt: str) -> bool:
        """Whether an attempt of a number that stays is one that no manifest names, nor ever will."""
        manifest = self._manifest(seq)
        if manifest is None or attempt == manifest.attempt or seq in self._newer:
            return False
        if seq not in self._listing.bases:
            return not attempt.startswith("c")  # a compaction that may still be going on
        equivalent = self._named_by_equivalent(manifest)
        if equivalent is None:
            return not attempt.startswith("c")
        return attempt not in equivalent

    def _named_by_equivalent(self, manifest: Manifest) -> set[str] | None:
        """The attempts that the equivalent of a checkpoint consists of, whole or not; None where nobody can tell."""
        try:
            found = self._repository.equivalent(manifest)
        except CorruptionError:
            return None
        if found is None:
            return None
        parsed = [layout.parse_key(ref.key) for ref in found.ranks]
        return {key.attempt for key in parsed if key is not None}


@dataclass
class _Progress:
    forgotten: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    bytes_freed: int = 0
    silent: bool = False
    """The store does not answer: there is no use in going on."""

    def failed(self, what: str, error: StorageError) -> None:
        self.failures.append(f"{what}: {error}")
        self.silent = self.silent or error.retryable


def _execute(
    repository: Repository, plan: PrunePlan, progress: Progress | None, now: Callable[[], datetime]
) -> PruneReport:
    """Carry a plan out: `.gone` of children before that of their parents, then equivalents, then data.

    Where a `.gone` may not be there, that checkpoint and all below it, which it may need, are left for the next prune.
    """
    done = _Progress()
    floor = 0
    for seq in reversed(plan.forgotten):
        gone = Gone(seq, now())
        try:
            repository.store.put_if_absent(gone.key, [gone.to_bytes()])
        except StorageError as error:
            done.failed(f"seq {seq} is not forgotten", error)
            floor = seq
            break
        done.forgotten.append(seq)
    for seq, key in plan.equivalents:
        if seq > floor and not done.silent:
            _delete(repository, [key], f"the equivalent base of seq {seq} is not deleted", done)
    passed, total = 0, plan.bytes
    for removal in plan.removals:
        left = done.silent or (removal.why == "forgotten" and removal.seq <= floor)
        if not left and _delete(repository, removal.keys, f"{removal.prefix} is not deleted", done):
            done.bytes_freed += removal.bytes
        passed += removal.bytes
        if progress is not None:
            progress(passed, total)
    _sweep(repository, done)
    for failure in done.failures:
        log.warning("prune: %s (the next prune tries again)", failure)
    return PruneReport(plan, True, tuple(sorted(done.forgotten)), done.bytes_freed, tuple(done.failures))


def _delete(repository: Repository, keys: Sequence[str], otherwise: str, done: _Progress) -> bool:
    try:
        repository.store.delete(keys)
    except StorageError as error:
        done.failed(otherwise, error)
        return False
    return True


def _sweep(repository: Repository, done: _Progress) -> None:
    """Temporary files of dead writers, which stores in folders hide from listings."""
    sweep = getattr(repository.store, "sweep", None)
    if sweep is None or done.silent:
        return
    try:
        done.bytes_freed += sweep()
    except StorageError as error:
        done.failed("temporary files are not removed", error)
