"""A repository copied object by object, to a folder or a bucket and back, resumes as if it had never moved."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_server import BUCKET, S3Server

from incremental_ckpt import Checkpointer, Repository, open_store
from incremental_ckpt.storage import LocalStore, Store
from incremental_ckpt.storage.s3 import S3Store

sys.path.append(str(Path(__file__).parents[1] / "oracle"))
from small_runs import Run, assert_same, truth

STEPS = 6


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()


@pytest.fixture
def bucket(s3_server: S3Server, aws: Any) -> Callable[[], Store]:
    url = f"s3://{BUCKET}/{secrets.token_hex(8)}?endpoint_url={s3_server.url}"
    return lambda: S3Store(url, session=aws)


def sync(source: Store, target: Store) -> None:
    """What aws s3 sync does."""
    for one in source.list():
        target.put(one.key, [source.get(one.key)])


def live(store: Store, resumes_at: int, until: int) -> Run:
    """A life of the run: resumes, and saves after every step."""
    run = Run()
    with Checkpointer(run.model, store, kind="consecutive", **run.arguments) as checkpointer:
        progress = checkpointer.resume_from_checkpoint()
        assert (progress.step if progress else 0) == resumes_at
        for step in range(resumes_at + 1, until + 1):
            run.train()
            checkpointer.save_checkpoint(step).wait()
    return run


def test_a_synced_repository_goes_on_from_disk_to_s3_and_back(tmp_path: Path, bucket: Callable[[], Store]) -> None:
    states = truth("adagrad", STEPS)
    live(LocalStore(tmp_path / "run"), 0, 2)
    sync(LocalStore(tmp_path / "run"), bucket())
    assert_same(live(bucket(), 2, 4).copy(), states[4])
    sync(bucket(), LocalStore(tmp_path / "back"))
    assert_same(live(LocalStore(tmp_path / "back"), 4, STEPS).copy(), states[STEPS])
    assert [one.step for one in Repository(open_store(tmp_path / "back")).checkpoints()] == [*range(1, STEPS + 1)]


def test_a_folder_copied_with_its_repository_goes_on(tmp_path: Path) -> None:
    states = truth("adagrad", 4)
    live(LocalStore(tmp_path / "run"), 0, 2)
    subprocess.run(["cp", "-r", tmp_path / "run", tmp_path / "copy"], check=True)
    assert_same(live(LocalStore(tmp_path / "copy"), 2, 4).copy(), states[4])


def test_a_repository_of_a_bucket_goes_on_in_a_folder_and_in_another_bucket(
    tmp_path: Path, bucket: Callable[[], Store], s3_server: S3Server, aws: Any
) -> None:
    states = truth("adagrad", 4)
    live(bucket(), 0, 2)
    elsewhere = S3Store(f"s3://{BUCKET}/{secrets.token_hex(8)}?endpoint_url={s3_server.url}", session=aws)
    for copy in (LocalStore(tmp_path / "copy"), elsewhere):
        sync(bucket(), copy)
        assert_same(live(copy, 2, 4).copy(), states[4])


def test_a_second_sync_carries_what_is_new(tmp_path: Path, bucket: Callable[[], Store]) -> None:
    local = LocalStore(tmp_path / "run")
    live(local, 0, 2)
    sync(local, bucket())
    live(local, 2, 3)
    sync(local, bucket())
    assert [(one.key, one.size) for one in bucket().list()] == [(one.key, one.size) for one in local.list()]
    assert_same(live(bucket(), 3, 3).copy(), truth("adagrad", 3)[3])
