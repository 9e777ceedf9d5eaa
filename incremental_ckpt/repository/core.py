"""Repository: manifests in a store, read with every digest verified, and the one write that commits.

It must not know models, ranks or threads, and must not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TypeVar

import numpy as np

from incremental_ckpt.arguments import an, whole
from incremental_ckpt.errors import ConflictError, CorruptionError, NotFoundError, SaveError, StorageError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Manifest, RankManifest, RankRef, Wanted
from incremental_ckpt.format.markers import Resume
from incremental_ckpt.format.sealed import digest_of
from incremental_ckpt.model import CheckpointInfo
from incremental_ckpt.repository.chain import Link, Reading, Unread, walk
from incremental_ckpt.repository.check import CheckReport, check_repository
from incremental_ckpt.repository.lineage import read_resume_markers, whole_ancestors, write_resume_marker
from incremental_ckpt.repository.listing import Listing, check_size, list_checkpoints
from incremental_ckpt.repository.read import read_table
from incremental_ckpt.repository.repo_file import has_repo_file, is_repository, make_repository
from incremental_ckpt.storage.base import Store

log = logging.getLogger("incremental_ckpt")

_LISTING_RETRIES = 12
_KNOWN_MANIFESTS = 4096
T = TypeVar("T")


class Repository:
    """The checkpoints in a store. Reading it needs no model and no torch.

    Raises:
        FormatError: the store holds something else, or a newer format.
        CorruptionError: ``repo.json`` is damaged.
        StorageError: the store does not answer.
        TypeError: it is made of no Store.
    """

    def __init__(self, store: Store) -> None:
        if isinstance(store, type) or not callable(getattr(store, "put_if_absent", None)):
            raise TypeError(f"a Repository is made of a Store, as open_store('runs/17') gives one, not of {store!r}")
        self.store = store
        self._manifests: dict[str, Manifest] = {}
        self._too_large: dict[str, int] = {}
        self._exists = is_repository(store)

    @property
    def exists(self) -> bool:
        """Whether the store is known to be a repository, and not an empty one."""
        return self._exists

    def create(self) -> None:
        """Make an empty store a repository. What exists is left as it is."""
        if not self._exists:
            make_repository(self.store)
            self._exists = is_repository(self.store)

    def has_lost_repo_file(self) -> bool:
        """Whether somebody has removed ``repo.json`` since the store was a repository; ``create`` makes it again."""
        lost = self._exists and not has_repo_file(self.store)
        self._exists = self._exists and not lost
        return lost

    def forget(self) -> None:
        """Read manifests anew, also those that are known."""
        self._manifests.clear()

    def listing(self, after: int = 0) -> Listing:
        """The numbers above ``after``."""
        listing, too_large = list_checkpoints(self.store, after)
        self._too_large |= too_large
        return listing

    def manifest(self, seq: int) -> Manifest:
        """The manifest of a checkpoint, verified.

        Raises:
            NotFoundError: no such checkpoint.
            CorruptionError: it is damaged.
        """
        return self._read_manifest(layout.manifest_key(seq), seq)

    def _read_manifest(self, key: str, seq: int) -> Manifest:
        if (known := self._manifests.get(key)) is None:
            check_size(self.store, key, self._too_large.get(key, 0))
            known = Manifest.from_bytes(self.store.get(key), key)
            if known.seq != seq:
                raise CorruptionError(
                    f"{key} in {self.store.url} is the manifest of seq {known.seq}: it was copied over another. "
                    "Restore it from a copy",
                    key=key, expected=f"seq {seq}", found=f"seq {known.seq}",
                )  # fmt: skip
            if len(self._manifests) >= _KNOWN_MANIFESTS:
                self._manifests.pop(next(iter(self._manifests)))
            self._manifests[key] = known
        return known

    def newest(self) -> Manifest | None:
        """The newest checkpoint, or None in an empty repository. Raises CorruptionError where its manifest is
        damaged."""

        def read() -> Manifest | None:
            seqs = self.listing().seqs
            return self.manifest(seqs[-1]) if seqs else None

        return self.retried(read)

    def newest_of(self, job: str, after: int) -> Manifest | None:
        """The newest checkpoint of this job above ``after``, also where another job has gone on behind it. What counts
        is the store, never memory: a put can have landed late."""
        above = (self.manifest(seq) for seq in reversed(self.listing(after).seqs))
        return next((manifest for manifest in above if manifest.job == job), None)

    def newest_in(self, listing: Listing, after: int) -> Manifest | None:
        """The newest checkpoint of a listing above ``after``, whoever wrote it."""
        return self.manifest(listing.seqs[-1]) if listing.seqs and listing.seqs[-1] > after else None

    def checkpoints(self) -> list[CheckpointInfo]:
        """All visible checkpoints, by ascending seq."""

        def read() -> list[CheckpointInfo]:
            return [self.manifest(seq).info() for seq in self.listing().seqs]

        return self.retried(read)

    def find(self, step: int) -> Manifest:
        """The checkpoint of a step; of several the one with the highest seq. Damaged manifests are passed over with a
        warning.

        Raises:
            NotFoundError: naming the steps that there are.
            CorruptionError: none that can be read is of this step.
            TypeError, ValueError: no number.
        """
        step = whole("step", step)

        def read() -> Manifest:
            manifests: list[Manifest] = []
            damaged: CorruptionError | None = None
            for seq in self.listing().seqs:
                try:
                    manifests.append(self.manifest(seq))
                except CorruptionError as damage:
                    log.warning("passing over seq %d in the search for step %d: %s", seq, step, damage)
                    damaged = damage
            found = [m for m in manifests if m.step == step]
            if not found and damaged is not None:
                raise CorruptionError(
                    f"{self.store.url} has no readable checkpoint of step {step}; it may be the damaged one: {damaged}",
                    key=damaged.key, expected=damaged.expected, found=damaged.found,
                ) from damaged  # fmt: skip
            if not found:
                steps = sorted({m.step for m in manifests})
                shown = ", ".join(map(str, steps[-20:])) if steps else "none"
                raise NotFoundError(f"{self.store.url} has no checkpoint of step {step}. Steps (newest 20): {shown}")
            return found[-1]

        return self.retried(read, on_missing_checkpoint=False)

    def chain(self, seq: int | None = None) -> list[CheckpointInfo]:
        """What a resume of ``seq`` (None: the newest) replays: a base first, ``seq`` last."""
        return self.read_along(lambda links: [link.manifest.info() for link in links], seq)

    def resolve(self, seq: int | None) -> int:
        """``seq`` if it is visible, the newest for None.

        Raises:
            NotFoundError: there is no such checkpoint, or none at all.
            TypeError, ValueError: no number.
        """
        seq = None if seq is None else whole("seq", seq)
        seqs = self.listing().seqs
        if seq is None:
            if not seqs:
                raise NotFoundError(f"{self.store.url} holds no checkpoint")
            return seqs[-1]
        if seq not in seqs:
            raise NotFoundError(
                f"{self.store.url} has no checkpoint {seq}"
                + (f"; it has {seqs[0]} to {seqs[-1]} ({len(seqs)} of them)" if seqs else ": it is empty")
            )  # no key: it is not that a named object is missing
        return seq

    def links(self, seq: int, listing: Listing | None = None, unread: Unread | None = None) -> list[Link]:
        """The chain of a checkpoint, base first, each manifest verified against the digest that its child names.

        Args:
            unread: passes over equivalent bases that cannot be read; None: they are an error.

        Raises:
            CorruptionError: a manifest is damaged or not the one that the child names; that of an equivalent base too,
                which ``read_along`` passes over.
            FormatError: one is of a newer version.
            NotFoundError: one is missing.
        """
        bases = (listing or self.listing()).bases
        return [*walk(self, self.manifest(seq), bases, unread)][::-1]

    def read_along(self, read: Callable[..., T], *seqs: int | None) -> T:
        """``read`` of the chains of some checkpoints (None: the newest), a list of links each, base first.

        An equivalent base that is damaged or of a newer version is passed over with a warning, for the chain that it
        stands for, as a resume does; ``read`` is then called again. So it is where an object is missed that a prune or
        a compaction may have taken.

        Raises:
            NotFoundError: no such checkpoint, or ``read`` says so and names no object.
            CorruptionError: something that is needed is damaged or missing.
            FormatError: it is of a newer version, or the equivalent base is and the chain is not whole.
        """
        return Reading(self, seqs).run(read)

    def equivalent(self, manifest: Manifest) -> Manifest | None:
        """The equivalent base of a checkpoint, if there is one. Raises CorruptionError where it is damaged."""
        try:
            found = self._read_manifest(layout.base_key(manifest.seq), manifest.seq)
        except NotFoundError:
            return None
        return found if found.of == manifest.digest else None

    def rank_manifests(self, manifest: Manifest, wanted: Wanted | None = None) -> list[RankManifest]:
        """The rank manifests that a manifest names, verified. Order of ranks."""
        return [self.rank_manifest(ref, wanted) for ref in manifest.ranks]

    def rank_manifest(self, ref: RankRef, wanted: Wanted | None = None) -> RankManifest:
        """Args: wanted: which of its shards; None: all."""
        check_size(self.store, ref.key, ref.size)
        raw = self.store.get(ref.key, 0, ref.size)
        if wanted is None:
            found = RankManifest.from_bytes(raw, ref.key)
        else:
            found = RankManifest.partly_from_bytes(raw, ref.key, wanted)
        digest = digest_of(raw)
        if digest != ref.digest:
            raise CorruptionError(
                f"{ref.key} in {self.store.url} is not the one that its manifest names. Restore it from a copy, or "
                "resume an ancestor",
                key=ref.key, expected=ref.digest, found=digest,
            )  # fmt: skip
        return found

    def commit(self, manifest: Manifest) -> Manifest:
        """Create the manifest if no object of that number exists: the commit (I4).

        Returns:
            The manifest with its digest.

        Raises:
            SaveError: an earlier attempt of this job has landed late and holds the number; that one counts.
            ConflictError: another job holds the number.
            StorageError: the store did not answer, and does not show the manifest either.
        """
        key, raw = layout.manifest_key(manifest.seq), manifest.to_bytes()
        ours = Manifest.from_bytes(raw, key)
        try:
            if self.store.put_if_absent(key, [raw]):
                return ours
        except StorageError:
            # The answer may be what was lost. Only the bytes in the store tell.
            if self._stored(key) is None:
                raise
        stored = self._stored(key)
        if stored is None:
            raise StorageError(f"{self.store.url} says that {key} exists and cannot find it", retryable=True)
        if stored == raw:
            return ours
        winner = Manifest.from_bytes(stored, key)
        if winner.job == manifest.job:
            raise SaveError(
                f"save of step {manifest.step} failed: an earlier attempt of this job (step {winner.step}) reached "
                f"{self.store.url} late and "
                f"is now seq {winner.seq}. The rows of this save go into the next one"
            )
        raise self.lost_to(winner, manifest.job)

    def lost_to(self, winner: Manifest, job: str) -> ConflictError:
        """What ``job`` is to be told when ``winner``, of another job, holds its number or one above."""
        return ConflictError(
            f"another job ({winner.job}) has committed seq {winner.seq} (step {winner.step}) in {self.store.url} while "
            f"this one ({job}) was running. Stop this job: its state is not the newest any more, and its process can "
            "save no more, not even after a resume. A new process may go on from the newest checkpoint once the other "
            "has ended"
        )

    def _stored(self, key: str) -> bytes | None:
        try:
            return bytes(self.store.get(key))
        except NotFoundError:
            return None

    def write_resume_marker(self, job: str, n: int, *, seq: int, newest: int, now: datetime | None = None) -> None:
        """Tell prune that this job counts from ``seq``, before anything of it is read."""
        write_resume_marker(self.store, job, n, seq=seq, newest=newest, now=now)

    def resume_markers(self) -> list[Resume]:
        """All resumes of this run, each with the number resumed from and the newest of that time."""
        return read_resume_markers(self.store)

    def fallbacks(self, seq: int, listing: Listing) -> Iterator[Manifest]:
        """What may be resumed instead of a damaged ``seq``, best first: its ancestors, and nothing that merely has a
        lower number."""
        return whole_ancestors(self, seq, listing)

    def retried(self, read: Callable[[], T], *, on_missing_checkpoint: bool = True) -> T:
        """Run ``read`` again where it misses an object: a prune or a compaction may have passed since its listing.

        Raises:
            CorruptionError: the object is missing for good.
        """
        missing: NotFoundError | None = None
        for _ in range(_LISTING_RETRIES):
            try:
                return read()
            except NotFoundError as error:
                if error.key is None and not on_missing_checkpoint:
                    raise
                if missing is not None and error.key == missing.key:
                    break
                missing = error
                self._manifests.clear()
        assert missing is not None
        raise CorruptionError(
            f"an object that is named in {self.store.url} is missing: {missing}. Restore it from a copy, or resume an "
            "ancestor",
            key=missing.key or "", expected="an object", found="none",
        ) from missing  # fmt: skip

    def read_table(
        self, name: str, seq: int | None = None, rows: slice = slice(None), field: str = "weight"
    ) -> np.ndarray:
        """Rows of a table as of a checkpoint (None: the newest).

        Returns:
            ``[rows, cols]`` in the field's dtype (bfloat16 and float8, which numpy lacks, as float32).

        Raises:
            NotFoundError: no such checkpoint, table or field.
            CorruptionError: something it needs is damaged.
            TypeError, ValueError: an argument is not what it should be.
        """
        an(slice, "rows", rows, "a slice, such as slice(0, 100)")
        return self.read_along(lambda links: read_table(self, links, name, rows, field), seq)

    def check(self, *, deep: bool = False) -> CheckReport:
        """Prove what is here: everything named exists with its size and digest, every chain reaches a base, all rows
        are covered.

        Args:
            deep: also read every pack and verify every checksum.
        """
        return check_repository(self, deep=deep)
