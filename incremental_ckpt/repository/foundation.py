"""What the deltas of a run stand on, and whether it is still in the store: a cleaner or a hand may take it under a run.

It must not know ranks or attempts, and must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from incremental_ckpt.errors import CorruptionError, FormatError, NotFoundError
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
        self._bases: frozenset[int] = frozenset()
        self._parent: CheckpointRef | None = None
        self._base: Manifest | None = None

    def missing_below(self, parent: CheckpointRef) -> str | None:
        """What is missing of the base under a parent, or of the manifests that lead there; None while all is there.

        It takes one listing, of the base's folder: manifests that are known are not read again as long as their base
        is there.
        """
        if self._missing_below(parent) is None:
            return None
        # Seen with what was known before; a prune or a compaction may have passed.
        self._repository.forget()
        self._parent = self._base = None
        self._bases = self._repository.listing().bases
        self.missing = self._missing_below(parent)
        return self.missing

    def missing_in(self, listing: Listing) -> str | None:
        """Which manifests of the chain a listing that begins with it lacks."""
        lost = [layout.manifest_key(seq) for seq in self.chain if seq not in listing.committed]
        return f"{lost[0]} is missing" + (f", and {len(lost) - 1} more" if lost[1:] else "") if lost else None

    def _missing_below(self, parent: CheckpointRef) -> str | None:
        try:
            base = self._base_of(parent)
        except (NotFoundError, CorruptionError, FormatError) as damage:
            return str(damage)
        if base is None:
            return f"{layout.manifest_key(parent.seq)} is of another run"
        found = {
            place: {one.key: one.size for one in self._repository.store.list(layout.attempt_prefix(*place))}
            for place in dict.fromkeys(places_of(base))
        }
        return missing_of(base, found)

    def _base_of(self, parent: CheckpointRef) -> Manifest | None:
        """What the tables of the chain's first link are read from; None where the parent is another checkpoint."""
        if parent == self._parent:
            return self._base
        manifest = self._repository.manifest(parent.seq)
        if manifest.digest != parent.digest:
            return None
        if self._base is not None and manifest.parent == self._parent:
            chain = (*self.chain, parent.seq)  # the delta saved last: the chain need not be walked
        else:
            links = self._repository.links(parent.seq, Listing((), frozenset(), self._bases))
            chain, self._base = tuple(link.manifest.seq for link in links), links[0].tables
        self.chain, self._parent = chain[-_MOST_LISTED:], parent
        return self._base
