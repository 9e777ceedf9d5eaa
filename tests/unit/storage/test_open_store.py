"""From what users write to a store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from incremental_ckpt.errors import StorageError
from incremental_ckpt.storage import LocalStore, MemoryStore, Store, open_store
from incremental_ckpt.storage.retry import RetryStore


def test_a_path_is_a_local_store_and_is_not_created(tmp_path: Path) -> None:
    for path in (tmp_path / "a", str(tmp_path / "a"), f"file://{tmp_path}/a", f"FILE://localhost{tmp_path}/a"):
        store = open_store(path)
        assert isinstance(store, LocalStore)
        assert store.url == str(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_file_url_is_unquoted_and_a_path_is_not(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}/a%20b").url == f"{tmp_path}/a b"
    assert open_store(f"{tmp_path}/a%20b").url == f"{tmp_path}/a%20b"


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/runs").url == str(tmp_path / "runs")


def test_memory_stores_of_one_name_share_their_objects() -> None:
    open_store("memory://test-open-a").put("x", [b"1"])
    assert bytes(open_store("memory://test-open-a").get("x")) == b"1"
    assert list(open_store("memory://test-open-b").list()) == []
    assert open_store("memory://test-open-a").url == "memory://test-open-a"


def test_memory_stores_without_a_name_share_nothing() -> None:
    open_store("memory://").put("x", [b"1"])
    assert list(open_store("memory://").list()) == []


def test_a_store_is_handed_back() -> None:
    store = MemoryStore()
    assert open_store(store) is store


def test_an_unknown_scheme_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(StorageError, match=r"'gopher'.*local path, file:///PATH, memory://NAME"):
        open_store("gopher://bucket/run")


@pytest.mark.parametrize("url", ["file://host/a", "file://", "file:///a?b", "file:///a#b"])
def test_a_file_url_that_names_no_local_path_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match="file:///ABSOLUTE/PATH"):
        open_store(url)


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(StorageError, match="empty"):
        open_store("")


@pytest.mark.parametrize("what", [None, 3, b"bytes", object()])
def test_what_is_no_store_is_refused(what: object) -> None:
    with pytest.raises(TypeError, match="URL or a path"):
        open_store(what)  # type: ignore[arg-type]


def test_read_only_is_passed_on(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(StorageError, match="read_only"):
            open_store(url, read_only=True).put("a", [b""])


def test_stores_and_the_test_kit_load_neither_torch_nor_pytest() -> None:
    script = (
        "import sys, incremental_ckpt.storage, incremental_ckpt.testing\n"
        "sys.exit(', '.join({'torch', 'pytest', 'boto3', 'fsspec'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_its_package_a_scheme_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme, package in (("s3", "boto3"), ("gs", "fsspec")):
        monkeypatch.setitem(sys.modules, package, None)
        for module in ("s3", "s3_client", "fsspec"):
            monkeypatch.delitem(sys.modules, f"incremental_ckpt.storage.{module}", raising=False)
        with pytest.raises(
            StorageError, match=rf"pip install 'incremental-ckpt\[{'s3' if scheme == 's3' else 'fsspec'}\]'"
        ):
            open_store(f"{scheme}://bucket/run")


@pytest.mark.parametrize("almost", ["s3:/bucket/run", "S3:bucket", "gs:/b", "file:x"])
def test_a_url_with_too_few_slashes_is_not_taken_for_a_folder(almost: str) -> None:
    with pytest.raises(StorageError, match=r"neither a URL nor a usual path: write \w+://"):
        open_store(almost)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_store_that_may_only_be_read_is_refused_where_it_is_to_be_written(tmp_path: Path, wrapped: bool) -> None:
    (tmp_path / "run").mkdir()
    store: Store = LocalStore(tmp_path / "run", read_only=True)
    store = RetryStore(store) if wrapped else store
    with pytest.raises(StorageError, match=f"cannot write to {tmp_path / 'run'}: the store was opened with read_only"):
        open_store(store)
    assert open_store(store, read_only=True) is store
