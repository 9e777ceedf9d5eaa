"""Every store of the package keeps what docs/format.md section 2 promises."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from incremental_ckpt.storage import LocalStore, MemoryStore, Store, directio
from incremental_ckpt.testing import FaultStore, StoreTests, TracingStore


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
