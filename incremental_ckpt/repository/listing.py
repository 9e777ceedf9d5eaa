"""What a listing tells before an object is read: which checkpoints there are, and what is too large for a document.

It must not know what the objects say, and reads none.
"""

from __future__ import annotations

from dataclasses import dataclass

from incremental_ckpt.errors import CorruptionError
from incremental_ckpt.format import layout
from incremental_ckpt.format.sealed import MAX_BYTES
from incremental_ckpt.storage.base import Store

_LAST_8_DIGIT_SEQ = 99_999_999


@dataclass(frozen=True)
class Listing:
    """What one listing of ``manifests/`` showed.

    Attributes:
        seqs: visible numbers, ascending.
        gone: forgotten numbers.
        bases: numbers that have an equivalent base.
        committed: numbers that have a manifest, visible or forgotten.
    """

    seqs: tuple[int, ...]
    gone: frozenset[int]
    bases: frozenset[int]
    committed: frozenset[int] = frozenset()


def list_checkpoints(store: Store, after: int) -> tuple[Listing, dict[str, int]]:
    """The numbers above ``after``, and by key the sizes in bytes of those objects that are too large for documents."""
    seqs, gone, bases = set(), set(), set()
    too_large: dict[str, int] = {}
    begin = layout.manifest_key(after) if 0 < after < _LAST_8_DIGIT_SEQ else ""
    for stored in store.list(layout.MANIFESTS, after=begin):
        parsed = layout.parse_key(stored.key)
        if parsed is None or parsed.seq <= after:
            continue
        if stored.size > MAX_BYTES:
            too_large[stored.key] = stored.size
        if parsed.what == "manifest":
            seqs.add(parsed.seq)
        elif parsed.what == "gone":
            gone.add(parsed.seq)
        elif parsed.what == "base":
            bases.add(parsed.seq)
    listing = Listing(tuple(sorted(seqs - gone)), frozenset(gone), frozenset(bases), frozenset(seqs))
    return listing, too_large


def check_size(store: Store, key: str, size: int) -> None:
    """Raises CorruptionError where an object is too large for a document: before it is read into memory."""
    if size > MAX_BYTES:
        raise CorruptionError(
            f"{key} in {store.url} is damaged: with {size} bytes it is too large. Restore it from a copy, or "
            "resume an ancestor",
            key=key, expected=f"at most {MAX_BYTES} bytes", found=f"{size} bytes",
        )  # fmt: skip
