"""Writes that time out and take effect later, at every moment: never a false ConflictError, never a lost commit."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from s3_server import BUCKET, Answer, DroppedConnectionError, Proceed, Request, S3Server

from incremental_ckpt import Checkpointer, Repository, SaveError, StorageError
from incremental_ckpt.storage import MemoryStore, Store
from incremental_ckpt.storage.retry import Retry, RetryStore
from incremental_ckpt.storage.s3 import S3Store
from incremental_ckpt.testing import FaultStore, LateWrites, on

sys.path.append(str(Path(__file__).parents[2] / "oracle"))
from small_runs import Run, assert_same

LOST = 3
"""Tries that get no answer; the one after them does."""

MOMENTS = {"before the first retry": 1, "between the retries": 2, "before the last retry": 3, "after the retries": 0}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()


class LateService:
    """A store whose first tries of a kind of write time out, behind retries, and which they reach at a set moment.

    Args:
        pause: they take effect in this pause, counted from 1; 0: when ``land`` is called.
    """

    def __init__(self, inner: Store, kind: Any, key: str, pause: int, within: float = 1000.0) -> None:
        self.late = LateWrites(on(kind, key, at=range(1, LOST + 1)))
        self.pauses = 0
        self.now = 0.0
        self._pause = pause
        retry = Retry(first=1.0, within=within, sleep=self._sleep, clock=lambda: self.now, uniform=lambda: 1.0)
        self.store = RetryStore(FaultStore(inner, self.late), retry)

    def land(self) -> list[Any]:
        return [*self.late.land_late()]

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses += 1
        if self.pauses == self._pause:
            self.land()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_put_that_lands_late_is_no_conflict(moment: str) -> None:
    inner = MemoryStore()
    service = LateService(inner, "put", "*", MOMENTS[moment])
    service.store.put("a", [b"ours"])
    assert service.pauses == LOST
    assert all(answer is None for answer in service.land())
    service.store.put("a", [b"ours"])
    assert bytes(inner.get("a")) == b"ours"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_put_if_absent_that_lands_late_finds_its_own_bytes_or_wrote_them(moment: str) -> None:
    inner = MemoryStore()
    service = LateService(inner, "put_if_absent", "*", MOMENTS[moment])
    assert service.store.put_if_absent("a", [b"ours"]) is (moment == "after the retries")
    assert True not in service.land()
    assert bytes(inner.get("a")) == b"ours"


@pytest.mark.parametrize("kind", ["put", "put_if_absent"])
def test_a_write_that_lands_after_it_was_given_up_is_found_by_the_next_one(kind: str) -> None:
    inner = MemoryStore()
    service = LateService(inner, kind, "*", 0, within=2.0)
    write: Callable[..., Any] = getattr(service.store, kind)
    with pytest.raises(StorageError, match="given up after 2 tries"):
        write("a", [b"ours"])
    service.land()
    assert not write("a", [b"ours"])
    assert bytes(inner.get("a")) == b"ours"


KEYS = {"pack": ("put", "data/*.safetensors"), "vote": ("put", "data/*/rank-*.json"), "commit": ("put_if_absent", "m*")}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", KEYS)
def test_a_save_whose_writes_land_late_is_committed_once_and_goes_on(what: str, moment: str) -> None:
    inner, run, kept = MemoryStore(), Run(), {}
    kind, key = KEYS[what]
    service = LateService(inner, kind, key, MOMENTS[moment])
    with Checkpointer(run.model, service.store, **run.arguments) as checkpointer:
        for step in (1, 2, 3):
            run.train()
            checkpointer.save_checkpoint(step, kind="consecutive").wait()
            kept[step] = run.copy()
            service.land()
    assert service.pauses == LOST
    assert_steps(inner, kept)


@pytest.mark.parametrize("what", KEYS)
def test_a_save_that_was_given_up_and_lands_late_costs_no_row_and_is_no_conflict(what: str) -> None:
    inner, run, kept = MemoryStore(), Run(), {}
    kind, key = KEYS[what]
    service = LateService(inner, kind, key, 0, within=2.0)
    with Checkpointer(run.model, service.store, **run.arguments) as checkpointer:
        run.train()
        with pytest.raises(SaveError):
            checkpointer.save_checkpoint(1).wait()
        if what == "commit":
            kept[1] = run.copy()
        service.land()
        for step in (2, 3, 4):
            run.train()
            try:
                checkpointer.save_checkpoint(step, kind="consecutive").wait()
                kept[step] = run.copy()
            except SaveError as told:
                assert "late" in str(told) or "given up" in str(told)
                service.land()
    assert {3, 4} <= kept.keys() or {2, 4} <= kept.keys()
    assert_steps(inner, kept)


def assert_steps(store: Store, kept: dict[int, Any]) -> None:
    repository = Repository(store)
    assert repository.check(deep=True).problems == ()
    assert [one.step for one in repository.checkpoints()] == [*kept]
    assert_steps_resume(store, kept)


def assert_steps_resume(store: Store, kept: dict[int, Any]) -> None:
    for step, state in kept.items():
        heir = Run(seed=9)
        with Checkpointer(heir.model, store, **heir.arguments) as checkpointer:
            assert checkpointer.resume_from_checkpoint(step) is not None
        assert_same(heir.copy(), state)


class LateRequests:
    """A disturbance of a server: the first requests to put a key get no answer, and are carried out ``after`` more."""

    def __init__(self, key: str, after: int) -> None:
        self.held: list[tuple[Request, Proceed]] = []
        self.seen = 0
        self._key = key
        self._after = after

    def __call__(self, request: Request, proceed: Proceed) -> Answer:
        if request.operation != "PutObject" or not request.key.endswith(self._key):
            return proceed(request)
        self.seen += 1
        if self.seen == self._after:
            self.land()
        if self.seen <= LOST:
            self.held.append((request, proceed))
            raise DroppedConnectionError
        answer = proceed(request)
        if self._after > LOST + 1:
            self.land()
        return answer

    def land(self) -> None:
        held, self.held = self.held, []
        for request, proceed in held:
            proceed(request)


@pytest.fixture
def s3_store(s3_server: S3Server, aws: boto3.Session) -> Iterator[S3Store]:
    store = S3Store(f"s3://{BUCKET}/{secrets.token_hex(8)}?endpoint_url={s3_server.url}", session=aws)
    yield store
    store.close()


@pytest.mark.parametrize(
    ("key", "after"),
    [
        *(
            pytest.param("00000002.json", after, id=moment)
            for after, moment in zip((2, 3, 4, 99), MOMENTS, strict=True)
        ),
        pytest.param("rank-00000.json", 3, id="a vote"),
    ],
)
def test_a_request_that_reaches_s3_late_is_no_conflict_and_no_commit_is_lost(
    s3_server: S3Server, s3_store: S3Store, key: str, after: int
) -> None:
    run = Run()
    store = RetryStore(s3_store, Retry(first=0.0, within=60.0))
    with Checkpointer(run.model, store, **run.arguments) as checkpointer:
        run.train()
        checkpointer.save_checkpoint(1).wait()
        with s3_server.disturbed(late := LateRequests(key, after)):
            for step in (2, 3):
                run.train()
                checkpointer.save_checkpoint(step, kind="consecutive").wait()
        assert late.seen > LOST
    assert [one.step for one in Repository(s3_store).checkpoints()] == [1, 2, 3]
    assert_steps_resume(s3_store, {3: run.copy()})
