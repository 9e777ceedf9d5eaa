"""What the deltas of a run stand on, and whether it is still in the store: a cleaner or a hand may take it under a run.

It must not know ranks or attempts, and must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from incremental_ckpt.errors import CorruptionError, FormatError, NotFoundError, StorageError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Manifest
from incremental_ckpt.model import CheckpointRef
from incremental_ckpt.repository.listing import Listing

if TYPE_CHECKING:
    from incremental_ckpt.repository.core import Repository

Sizes = Mapping[str, int]
"""Of the objects of an attempt, in bytes by key."""

_PACK = ".safetensors"
_MOST_LISTED = 300
"""Manifests of a chain that are looked for in each listing: with their equivalents they fill one page of S3."""

_PASSES = 4
"""How often a prune or a compaction may overtake one look."""


def missing_of(manifest: Manifest, attempts: Mapping[tuple[int, str], Sizes]) -> str | None:
    """What is not there of the objects that a manifest stands for: its rank manifests, and packs of the sizes that it
    counts in sum; None where all is.

    Args:
        attempts: what is in the store, by number and name of the attempt.
    """
    held: dict[tuple[int, str], Sizes] = {}
    for place, ref in zip(places_of(manifest), manifest.ranks, strict=True):
        held[place] = attempts.get(place, {})
        if (size := held[place].get(ref.key)) != ref.size:
            return f"{ref.key} is missing" if size is None else f"{ref.key} has {size} bytes instead of {ref.size}"
    packs = sum(size for objects in held.values() for key, size in objects.items() if key.endswith(_PACK))
    found = packs + sum(ref.size for ref in manifest.ranks)
    if found >= manifest.totals.bytes:
        return None
    folders = ", ".join(layout.attempt_prefix(*place) for place in held)
    return f"{folders} has {found} bytes of packs and rank manifests instead of {manifest.totals.bytes}"


def places_of(manifest: Manifest) -> list[tuple[int, str]]:
    """Number and name of the attempt that each of its rank manifests belongs to."""
    parsed = [layout.parse_key(ref.key) for ref in manifest.ranks]
    return [(key.seq, key.attempt) for key in parsed if key is not None]


class Foundation:
    """What the next delta counts from: its chain, as it is known, compared with what the store shows.

    Attributes:
        chain: the numbers that the last parent asked for is read from, the newest of them where there are many.
        missing: what was missing of it.
    """

    def __init__(self, repository: Repository) -> None:
        self.chain: tuple[int, ...] = ()
        self.missing: str | None = None
        self._repository = repository
        self._parent: CheckpointRef | None = None
        self._base: Manifest | None = None
        self._unanswered = False

    def missing_below(self, parent: CheckpointRef) -> str | None:
        """What is missing of the base under a parent, or of the manifests that lead there; None while all is there.

        It takes one listing, of the base's folder, and another of all numbers where the chain has to be walked:
        manifests that are known are not read again as long as their base is there. What cannot be read counts as
        missing where the store says that trying again does not help, or has said twice in a row that it cannot be read.

        Raises:
            StorageError: the store does not answer.
        """
        try:
            self.missing = self._missing_anew(parent) if self._missing_below(parent) is not None else None
        except StorageError as error:
            if error.retryable and not self._unanswered:
                self._unanswered = True
                raise
            # It answers elsewhere, as the save has come this far: what it does not answer for is as good as gone.
            self._parent = self._base = None
            self.missing = str(error)
        self._unanswered = False
        return self.missing

    def missing_in(self, listing: Listing) -> str | None:
        """Which manifests of the chain a listing that begins with it lacks, unless a compaction has made up for it."""
        lost = [layout.manifest_key(seq) for seq in self.chain if seq not in listing.committed]
        if not lost or self._is_whole_anew():
            return None
        return f"{lost[0]} is missing" + (f", and {len(lost) - 1} more" if lost[1:] else "")

    def _is_whole_anew(self) -> bool:
        try:
            return self._parent is not None and self._missing_anew(self._parent) is None
        except Exception:  # what has been written is not known to be whole, whatever a store raises
            return False

    def _missing_anew(self, parent: CheckpointRef) -> str | None:
        """What is missing, whatever was known before: a prune or a compaction may have passed, also while it looks."""
        seen: Listing | None = None
        for _ in range(_PASSES):
            listing = self._repository.listing()
            if seen is not None and (listing.gone, listing.bases) == (seen.gone, seen.bases):
                break
            self._repository.forget()
            self._parent = self._base = None
            if (missing := self._missing_below(parent, listing)) is None:
                return None
            seen = listing
        return missing

    def _missing_below(self, parent: CheckpointRef, listing: Listing | None = None) -> str | None:
        try:
            base = self._base_of(parent, listing)
        except (NotFoundError, CorruptionError, FormatError) as damage:
            return str(damage)
        if base is None:
            return f"{layout.manifest_key(parent.seq)} is of another run"
        found = {
            place: {one.key: one.size for one in self._repository.store.list(layout.attempt_prefix(*place))}
            for place in dict.fromkeys(places_of(base))
        }
        return missing_of(base, found)

    def _base_of(self, parent: CheckpointRef, listing: Listing | None) -> Manifest | None:
        """What the tables of the chain's first link are read from; None where the parent is another checkpoint."""
        if parent == self._parent:
            return self._base
        manifest = self._repository.manifest(parent.seq)
        if manifest.digest != parent.digest:
            return None
        if self._base is not None and manifest.parent == self._parent:
            chain = (*self.chain, parent.seq)  # the delta saved last: the chain need not be walked
        elif manifest.parent is None and listing is None:
            chain, self._base = (parent.seq,), manifest
        else:
            links = self._repository.links(parent.seq, listing or self._repository.listing(), _passed_over)
            chain, self._base = tuple(link.manifest.seq for link in links), links[0].tables
        self.chain, self._parent = chain[-_MOST_LISTED:], parent
        return self._base


def _passed_over(seq: int, error: CorruptionError | FormatError) -> None:
    """An equivalent base that a resume cannot read is none: it says so itself, and reads what lies below."""
