"""From a URL or a path to a store.

It must not know more of a store than how it is constructed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from incremental_ckpt.errors import StorageError
from incremental_ckpt.storage.base import Store
from incremental_ckpt.storage.local import LocalStore
from incremental_ckpt.storage.memory import MemoryStore

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_KNOWN = "a local path, file:///PATH, memory://NAME"


def open_store(url: str | os.PathLike[str] | Store, *, read_only: bool = False) -> Store:
    """The store that a URL or a local path names; a Store is handed back as it is. Creates nothing.

    Args:
        read_only: never write, and do not ask whether the place could be written.

    Raises:
        StorageError: no such kind of store, or the place cannot be written (unless ``read_only``).
        TypeError: neither a URL, nor a path, nor a Store.
    """
    if not isinstance(url, (str, os.PathLike)):
        if not callable(getattr(url, "put_if_absent", None)):
            raise TypeError(f"a store is named by a URL or a path, or is a Store, not {type(url).__name__}: {url!r}")
        return url
    text = os.fspath(url)
    parsed = _URL.fullmatch(text)
    if parsed is None:
        if not text:
            raise StorageError(f"an empty string names no store: give {_KNOWN}")
        return LocalStore(Path(text).expanduser(), read_only=read_only)
    scheme = parsed["scheme"].lower()
    if scheme == "file":
        return LocalStore(_file_path(text), read_only=read_only)
    if scheme == "memory":
        return MemoryStore(parsed["rest"])
    raise StorageError(f"cannot open {text!r}: no store for the scheme {scheme!r}. Known are: {_KNOWN}")


def _file_path(url: str) -> Path:
    place = urlsplit(url)
    path = unquote(place.path)
    if place.netloc not in ("", "localhost") or not path.startswith("/") or place.query or place.fragment:
        raise StorageError(f"cannot open {url!r}: a file URL is file:///ABSOLUTE/PATH, special characters as %XX")
    return Path(path)
