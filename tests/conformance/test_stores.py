"""Every store of the package keeps what docs/format.md section 2 promises."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import BUCKET, PAGE, S3Server, make_bucket, ministack

from incremental_ckpt.storage import LocalStore, MemoryStore, Store, directio
from incremental_ckpt.storage.fsspec import FsspecStore
from incremental_ckpt.storage.retry import RetryStore
from incremental_ckpt.storage.s3 import LEAST_PART_BYTES, S3Store
from incremental_ckpt.testing import FaultStore, StoreTests, TracingStore


@pytest.fixture(scope="module")
def mini_stack(aws: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ministack(tmp_path_factory.mktemp("ministack")) as url:
        make_bucket(aws, url)
        yield url


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def connect(self, tmp_path: Path) -> Callable[[], Store]:
        name = secrets.token_hex(8)
        return lambda: MemoryStore(name)


class TestLocalStore(StoreTests):
    many = 200  # a folder has no pages

    @pytest.fixture
    def connect(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: LocalStore(tmp_path / "runs" / "17")


class TestLocalStoreWithoutDirectWrites(TestLocalStore):
    @pytest.fixture
    def connect(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Store]:
        monkeypatch.setattr(directio, "_O_DIRECT", 0)
        return lambda: LocalStore(tmp_path)


class TestStoresOfTheTestKit(StoreTests):
    @pytest.fixture
    def connect(self, tmp_path: Path) -> Callable[[], Store]:
        name = secrets.token_hex(8)
        return lambda: FaultStore(TracingStore(MemoryStore(name)))


class TestRetryStore(StoreTests):
    many = 200

    @pytest.fixture
    def connect(self) -> Callable[[], Store]:
        name = secrets.token_hex(8)
        return lambda: RetryStore(MemoryStore(name))


class TestS3Store(StoreTests):
    """With parts of 5 MiB, the least that S3 takes, so that the larger objects have several."""

    many = 3 * PAGE + 1

    @pytest.fixture
    def connect(self, s3_server: S3Server, aws: Any) -> Callable[[], Store]:
        url = f"s3://{BUCKET}/{secrets.token_hex(8)}?endpoint_url={s3_server.url}"
        return lambda: S3Store(url, part_bytes=LEAST_PART_BYTES, session=aws)


class TestS3StoreOnMiniStack(StoreTests):
    many = 50

    @pytest.fixture
    def connect(self, mini_stack: str, aws: Any) -> Callable[[], Store]:
        url = f"s3://{BUCKET}/{secrets.token_hex(8)}?endpoint_url={mini_stack}"
        return lambda: S3Store(url, part_bytes=LEAST_PART_BYTES, session=aws)


class TestFsspecStoreInMemory(StoreTests):
    many = 200

    @pytest.fixture
    def connect(self) -> Callable[[], Store]:
        name = secrets.token_hex(8)
        return lambda: FsspecStore(f"memory://{name}/17")


@pytest.mark.filterwarnings("ignore::incremental_ckpt.storage.fsspec.WeakerStoreWarning")
class TestFsspecStoreInAFolder(StoreTests):
    many = 200

    @pytest.fixture
    def connect(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: FsspecStore(f"file://{tmp_path}/runs/17")
