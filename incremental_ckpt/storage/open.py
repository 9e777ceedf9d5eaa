"""From a URL or a path to a store.

It must not know more of a store than how it is constructed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from incremental_ckpt.arguments import an, flag
from incremental_ckpt.errors import StorageError
from incremental_ckpt.storage.base import Store
from incremental_ckpt.storage.local import LocalStore
from incremental_ckpt.storage.memory import MemoryStore
from incremental_ckpt.storage.retry import Retry, RetryStore

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_ONE_SLASH = re.compile(r"(s3|gs|gcs|az|abfs|hdfs|file|memory):(?!//)", re.IGNORECASE)
_KNOWN = (
    "a local path, file:///PATH, memory://NAME, s3://BUCKET/PREFIX (extra 's3'), and gs://, az://, hdfs:// and "
    "whatever else fsspec knows (extra 'fsspec'; fsspec+SCHEME:// for its own file, memory and s3)"
)
_FSSPEC = "fsspec+"


def open_store(url: str | os.PathLike[str] | Store, *, read_only: bool = False, retry: Retry | None = None) -> Store:
    """The store that a URL or a local path names; a Store is handed back as it is. Creates nothing.

    Args:
        read_only: never write, and do not ask whether the place could be written.
        retry: how stores behind a network repeat what failed; a Store that is handed in is not wrapped.

    Raises:
        StorageError: no such kind of store, the place cannot be read, or (unless ``read_only``) not written.
        TypeError: neither a URL, nor a path, nor a Store, or another argument is not what it should be.
    """
    flag("read_only", read_only)
    if retry is not None:
        an(Retry, "retry", retry, "Retry(...)")
    if not isinstance(url, (str, os.PathLike)):
        if not callable(getattr(url, "put_if_absent", None)):
            raise TypeError(f"a store is named by a URL or a path, or is a Store, not {type(url).__name__}: {url!r}")
        if not read_only and getattr(url, "read_only", False):  # told now, and not at the end of the first save
            raise StorageError(f"cannot write to {url.url}: the store was opened with read_only=True")
        return url
    text = os.fspath(url)
    parsed = _URL.fullmatch(text)
    if parsed is None:
        if not text:
            raise StorageError(f"an empty string names no store: give {_KNOWN}")
        if (almost := _ONE_SLASH.match(text)) is not None:
            raise StorageError(f"{text!r} is neither a URL nor a usual path: write {almost[1]}://… or ./{text}")
        return LocalStore(Path(text).expanduser(), read_only=read_only)
    scheme = parsed["scheme"].lower()
    if scheme == "file":
        return LocalStore(_file_path(text), read_only=read_only)
    if scheme == "memory":
        return MemoryStore(parsed["rest"])
    retry = Retry() if retry is None else retry
    if scheme == "s3":
        return RetryStore(_s3_store(text, read_only, retry), retry)
    fsspec_url = text[len(_FSSPEC) :] if scheme.startswith(_FSSPEC) else text
    return RetryStore(_fsspec_store(fsspec_url, read_only, f"cannot open {text!r}"), retry)


def _s3_store(url: str, read_only: bool, retry: Retry) -> Store:
    try:
        from incremental_ckpt.storage.s3 import S3Store
    except ImportError as error:
        raise StorageError(
            f"cannot open {url!r}: {error}. S3 needs boto3: pip install 'incremental-ckpt[s3]'"
        ) from error
    return S3Store(url, read_only=read_only, retry=retry)


def _fsspec_store(url: str, read_only: bool, refusal: str) -> Store:
    scheme = url.partition(":")[0]
    try:
        from incremental_ckpt.storage.fsspec import FsspecStore, UnknownSchemeError
    except ImportError as error:
        raise StorageError(
            f"{refusal}: no store for the scheme {scheme!r} without fsspec: pip install 'incremental-ckpt[fsspec]'. "
            f"Known are: {_KNOWN}"
        ) from error
    try:
        return FsspecStore(url, read_only=read_only)
    except UnknownSchemeError as error:
        raise StorageError(f"{refusal}: no store for the scheme {scheme!r}. Known are: {_KNOWN}") from error


def _file_path(url: str) -> Path:
    place = urlsplit(url)
    path = unquote(place.path)
    if place.netloc not in ("", "localhost") or not path.startswith("/") or place.query or place.fragment:
        raise StorageError(f"cannot open {url!r}: a file URL is file:///ABSOLUTE/PATH, special characters as %XX")
    return Path(path)
