"""Which state lies behind which, over all resumes of a run: their markers, the lineage, and what to resume instead.

It must not know ranks or how anything is restored, and must not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from incremental_ckpt.errors import CorruptionError, NotFoundError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Lineage, Manifest, ancestors, owner
from incremental_ckpt.format.markers import Resume
from incremental_ckpt.repository.listing import Listing, check_size
from incremental_ckpt.storage.base import Store

if TYPE_CHECKING:
    from incremental_ckpt.repository.core import Repository

log = logging.getLogger("incremental_ckpt")


def lineage_after(newest: Manifest | None, job: str, resumed: int) -> Sequence[Lineage]:
    """The lineage of a job that begins when ``newest`` is the newest checkpoint and resumes from ``resumed`` (0: from
    nothing)."""
    before = newest.lineage if newest is not None else ()
    return (*before, Lineage(job, (newest.seq if newest is not None else 0) + 1, resumed))


def write_resume_marker(store: Store, job: str, n: int, *, seq: int, newest: int, now: datetime | None) -> None:
    marker = Resume(job, n, seq, newest, now or datetime.now(UTC))
    store.put(layout.resume_key(job, n), [marker.to_bytes()])


def read_resume_markers(store: Store) -> list[Resume]:
    stored = [one for one in store.list(layout.RESUMES) if layout.parse_key(one.key)]
    for one in stored:
        check_size(store, one.key, one.size)
    return [Resume.from_bytes(store.get(one.key), one.key) for one in stored]


def whole_ancestors(repository: Repository, seq: int, listing: Listing) -> Iterator[Manifest]:
    """What lies behind a damaged ``seq`` and can be read, newest first."""
    behind = behind_damaged(repository, seq, listing)
    lineage = _readable_lineage(repository, seq)
    for lower in sorted((s for s in listing.seqs if s < seq and s in behind), reverse=True):
        try:
            found = repository.manifest(lower)
        except (CorruptionError, NotFoundError) as damage:  # not found: a prune has passed
            log.warning("passing over seq %d: %s", lower, damage)
            continue
        if lineage and found.job != owner(lineage, lower).job:
            log.warning("passing over seq %d: job %s wrote it, which is none of this run's", lower, found.job)
            continue
        yield found


def _readable_lineage(repository: Repository, seq: int) -> Sequence[Lineage]:
    try:
        return repository.manifest(seq).lineage
    except (CorruptionError, NotFoundError):
        return ()


def behind_damaged(repository: Repository, seq: int, listing: Listing) -> set[int]:
    """The numbers whose states lie behind that of ``seq``, gone ones among them."""
    try:
        return set(ancestors(repository.manifest(seq).lineage, seq))
    except (CorruptionError, NotFoundError):
        return _behind_unreadable(repository, seq, listing)


def _behind_unreadable(repository: Repository, seq: int, listing: Listing) -> set[int]:
    """The manifest that would tell its lineage is the damaged one. It goes on from the number before it, unless a
    job has resumed from an older one, or begun anew, when that number was the newest: then nobody can tell, and
    guessing could go back to an abandoned branch."""
    before = [s for s in listing.seqs if s < seq]
    if not before:
        return set()
    for marker in repository.resume_markers():
        if marker.newest == before[-1] and marker.seq != before[-1]:
            return set()
    try:
        return set(ancestors(repository.manifest(before[-1]).lineage, before[-1]))
    except CorruptionError:
        return _behind_unreadable(repository, before[-1], listing)
