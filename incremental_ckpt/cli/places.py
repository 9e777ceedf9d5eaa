"""From the URL that a user gave to the store, and the repository in it.

It must not know what is done with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from incremental_ckpt.errors import NotFoundError
from incremental_ckpt.storage import LocalStore, Store, open_store

if TYPE_CHECKING:
    from incremental_ckpt.repository import Repository


def open_place(url: str, *, read_only: bool = True, may_be_new: bool = False) -> Store:
    """
    Raises:
        NotFoundError: a local path that does not exist. A store that can hold nothing but objects (a bucket's prefix)
            cannot tell this from an empty one.
        StorageError: as open_store.
    """
    store = open_store(url, read_only=read_only)
    if isinstance(store, LocalStore) and not may_be_new and not Path(store.url).exists():
        raise NotFoundError(f"{url} does not exist: check the path (a run that has saved nothing yet has no folder)")
    if not isinstance(store, LocalStore):
        _keep_log_silent()
    return store


def open_repository(url: str, *, read_only: bool = True, may_be_new: bool = False) -> Repository:
    """
    Raises:
        NotFoundError, StorageError: as open_place.
        FormatError, CorruptionError, StorageError: as Repository.
    """
    from incremental_ckpt.repository import Repository

    _keep_log_silent()
    return Repository(open_place(url, read_only=read_only, may_be_new=may_be_new))


def _keep_log_silent() -> None:
    """Warnings of the library would come between: what matters of them is in the reports."""
    import logging  # a listing of a folder does without: loading it takes a part of its time

    log = logging.getLogger("incremental_ckpt")
    if not log.hasHandlers():
        log.addHandler(logging.NullHandler())
