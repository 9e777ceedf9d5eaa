"""``repo.json``: whether a store is a repository, an empty place for one, or something else that is left alone.

It must not know checkpoints.
"""

from __future__ import annotations

from incremental_ckpt.errors import CorruptionError, FormatError, NotFoundError
from incremental_ckpt.format import layout
from incremental_ckpt.format.markers import RepoFile
from incremental_ckpt.format.sealed import FORMAT
from incremental_ckpt.repository.listing import check_size
from incremental_ckpt.storage.base import Store


def is_repository(store: Store) -> bool:
    """Whether it is one; False where it is empty.

    Raises:
        FormatError: it holds something else, a newer format, or features that this version does not know.
        CorruptionError: ``repo.json`` is damaged.
    """
    raw = _found(store)
    if raw is None:
        return False
    found = RepoFile.from_bytes(raw, layout.REPO)
    if found.features:
        raise FormatError(
            f"{store.url} uses features that this version does not know: {', '.join(found.features)}. "
            "Upgrade incremental_ckpt"
        )
    return True


def has_repo_file(store: Store) -> bool:
    """Whether ``repo.json`` is there, whatever it says. One read."""
    try:
        _read(store)
    except NotFoundError:
        return False
    return True


def make_repository(store: Store) -> None:
    """Make an empty store one. What exists is left as it is; whether this version can read it, is_repository tells."""
    store.put_if_absent(layout.REPO, [RepoFile(FORMAT, ()).to_bytes()])


def _found(store: Store) -> memoryview | None:
    try:
        return _read(store)
    except NotFoundError:
        first = next(iter(store.list()), None)
    if first is None:
        return None
    try:
        return _read(store)  # another job may have created it since, before anything else
    except NotFoundError:
        raise FormatError(
            f"{store.url} is not a repository: it has no {layout.REPO}, but holds other objects "
            f"({first.key!r} and perhaps more). "
            "Nothing was touched. Give an empty location, or the one that holds the checkpoints"
        ) from None


def _read(store: Store) -> memoryview:
    """As this version writes it, in one read of that size; else whatever it is, if it is not too large."""
    usual = RepoFile(FORMAT, ()).to_bytes()
    try:
        if (found := store.get(layout.REPO, 0, len(usual))) == usual:
            return found
    except CorruptionError:
        pass  # shorter, as the listing will tell
    for stored in store.list(layout.REPO):
        if stored.key == layout.REPO:
            check_size(store, layout.REPO, stored.size)
    return store.get(layout.REPO)
