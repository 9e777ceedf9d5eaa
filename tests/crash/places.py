"""Every store that the package brings, each as a place in which a run can die and be resumed: emptied after use.

It must not know what is stored there.
"""

from __future__ import annotations

import secrets
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import boto3
import fsspec
import pytest

from incremental_ckpt.storage import LocalStore, MemoryStore, Store
from incremental_ckpt.storage.fsspec import FsspecStore, WeakerStoreWarning
from incremental_ckpt.storage.s3 import S3Store

sys.path.append(str(Path(__file__).parents[1] / "conformance"))
from s3_server import BUCKET, S3Server, isolate_from_aws, make_bucket

Open = Callable[[], Store]
"""Another handle on the one store, as another process would open it."""

Place = Callable[[Path], AbstractContextManager[Open]]
"""An empty store, below a scratch folder where it needs one; it is removed afterwards."""


@contextmanager
def in_memory(scratch: Path) -> Iterator[Open]:
    name = secrets.token_hex(8)
    yield lambda: MemoryStore(name)
    store = MemoryStore(name)
    store.delete([one.key for one in store.list()])


@contextmanager
def in_a_folder(scratch: Path) -> Iterator[Open]:
    folder = scratch / secrets.token_hex(8)
    yield lambda: LocalStore(folder)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def in_fsspecs_memory(scratch: Path) -> Iterator[Open]:
    root = f"/{secrets.token_hex(8)}"
    yield lambda: FsspecStore(f"memory:/{root}")
    files = fsspec.filesystem("memory")
    if files.exists(root):
        files.rm(root, recursive=True)


@contextmanager
def in_fsspecs_folder(scratch: Path) -> Iterator[Open]:
    folder = scratch / secrets.token_hex(8)

    def open_again() -> Store:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeakerStoreWarning)
            return FsspecStore(f"file://{folder}")

    yield open_again
    shutil.rmtree(folder, ignore_errors=True)


class Bucket:
    """S3 over HTTP on loopback, started when it is first used. The handles of one place share a client: making one
    takes longer than a life."""

    def __init__(self) -> None:
        self._server: S3Server | None = None

    @contextmanager
    def __call__(self, scratch: Path) -> Iterator[Open]:
        with pytest.MonkeyPatch.context() as patch:
            isolate_from_aws(patch, scratch)
            session = boto3.Session()
            if self._server is None:
                self._server = S3Server()
                self._server.start()
                make_bucket(session, self._server.url)
            url = f"s3://{BUCKET}/{secrets.token_hex(8)}?endpoint_url={self._server.url}"
            store = S3Store(url, session=session)
            yield lambda: store
            store.delete([one.key for one in store.list()])
            store.close()
            self._server.requests.clear()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


BUCKET_ON_LOOPBACK = Bucket()
PLACES: Mapping[str, Place] = {
    "memory": in_memory,
    "local": in_a_folder,
    "fsspec-memory": in_fsspecs_memory,
    "fsspec-file": in_fsspecs_folder,
    "s3": BUCKET_ON_LOOPBACK,
}
