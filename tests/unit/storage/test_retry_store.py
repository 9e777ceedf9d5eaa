"""What is repeated, how long, and what a repetition may find."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from incremental_ckpt.errors import ConflictError, NotFoundError, StorageError
from incremental_ckpt.storage import MemoryStore, StoredObject
from incremental_ckpt.storage.retry import NO_RETRY, Retry, RetryStore
from incremental_ckpt.testing import FaultStore, LateWrites, fail, on


@dataclass
class FakeTime:
    """A clock that only sleeping moves."""

    now: float = 1000.0
    pauses: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def retry(self, within: float = 100.0, uniform: float = 0.5) -> Retry:
        return Retry(
            first=1.0, longest=8.0, within=within, sleep=self.sleep, clock=lambda: self.now, uniform=lambda: uniform
        )


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def inner() -> FaultStore:
    return FaultStore(MemoryStore())


@pytest.fixture
def store(inner: FaultStore, time: FakeTime) -> RetryStore:
    return RetryStore(inner, time.retry())


def refused(_: object) -> StorageError:
    return StorageError("cannot write: no permission")


class TestRetry:
    def test_pauses_double_up_to_the_longest_and_are_a_random_share(self, time: FakeTime) -> None:
        tries = iter([StorageError("busy", retryable=True)] * 6)

        def operation() -> str:
            error = next(tries, None)
            if error:
                raise error
            return "done"

        assert time.retry().call(operation) == "done"
        assert time.pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]

    def test_no_try_begins_after_the_deadline_and_the_error_says_how_many_there_were(self, time: FakeTime) -> None:
        begun: list[float] = []

        def operation() -> None:
            begun.append(time.now)
            raise StorageError("cannot write x: SlowDown", retryable=True)

        with pytest.raises(StorageError, match=r"SlowDown \(given up after 5 tries in 7\.5 s\)") as caught:
            time.retry(within=10.0).call(operation)
        assert caught.value.retryable
        assert begun[-1] - begun[0] <= 10.0

    def test_time_that_a_try_takes_counts(self, time: FakeTime) -> None:
        tries: list[int] = []

        def operation() -> None:
            tries.append(1)
            time.now += 60.0
            raise StorageError("stalled", retryable=True)

        with pytest.raises(StorageError):
            time.retry(within=100.0).call(operation)
        assert len(tries) == 2

    def test_what_was_given_up_inside_is_not_tried_again_outside(self, time: FakeTime) -> None:
        def operation() -> None:
            raise StorageError("busy", retryable=True)

        begun = time.now
        with pytest.raises(StorageError):
            time.retry(within=500.0).call(lambda: time.retry(within=50.0).call(operation))
        assert time.now - begun <= 50.0

    @pytest.mark.parametrize("uniform", [0.0, 0.5])
    def test_without_time_there_is_one_try(self, uniform: float) -> None:
        tries: list[int] = []

        def operation() -> None:
            tries.append(1)
            raise StorageError("busy", retryable=True)

        once = Retry(within=NO_RETRY.within, uniform=lambda: uniform, clock=lambda: 0.0)
        with pytest.raises(StorageError, match=r"^busy$"):
            once.call(operation)
        assert len(tries) == 1

    def test_a_thousand_tries_do_not_overflow(self, time: FakeTime) -> None:
        tries = iter([StorageError("busy", retryable=True)] * 2000)

        def operation() -> None:
            if error := next(tries, None):
                raise error

        time.retry(within=1e9).call(operation)
        assert max(time.pauses) <= 8.0


class TestRetryStore:
    @pytest.mark.parametrize("kind", ["put", "put_if_absent", "get", "list", "delete"])
    def test_every_operation_is_repeated(self, inner: FaultStore, store: RetryStore, time: FakeTime, kind: str) -> None:
        inner.put("a", [b"1"])
        inner.inject(fail(on(kind, at={1, 2})))  # type: ignore[arg-type]
        store.put("b", [b"2"])
        assert store.put_if_absent("c", [b"3"]) is True
        assert bytes(store.get("a")) == b"1"
        assert [one.key for one in store.list()] == ["a", "b", "c"]
        store.delete(iter(["a", "b"]))
        assert [one.key for one in store.list()] == ["c"]
        assert len(time.pauses) == 2

    @pytest.mark.parametrize(
        "error", [StorageError("no permission"), ConflictError("other"), NotFoundError("none"), ValueError("no range")]
    )
    def test_what_is_not_worth_it_fails_at_once(
        self, inner: FaultStore, store: RetryStore, time: FakeTime, error: Exception
    ) -> None:
        inner.inject(fail(on("get"), lambda _: error))
        with pytest.raises(type(error)) as caught:
            store.get("a")
        assert caught.value is error
        assert time.pauses == []

    def test_a_put_whose_answer_was_lost_succeeds(self, inner: FaultStore, store: RetryStore) -> None:
        inner.inject(fail(on("put", at=1), landed=True))
        store.put("a", [b"1"])
        assert bytes(store.get("a")) == b"1"

    def test_a_put_if_absent_whose_answer_was_lost_finds_its_own_object(
        self, inner: FaultStore, store: RetryStore
    ) -> None:
        inner.inject(fail(on("put_if_absent", at=1), landed=True))
        assert store.put_if_absent("a", [b"ours"]) is False
        assert bytes(store.get("a")) == b"ours"

    def test_a_put_if_absent_that_lands_after_its_repetition_changes_nothing(
        self, inner: FaultStore, store: RetryStore
    ) -> None:
        late = inner.inject(LateWrites(on("put_if_absent", at=1)))
        assert store.put_if_absent("a", [b"ours"]) is True
        assert late.land_late() == [False]

    def test_another_writers_object_is_not_taken_for_ours(self, inner: FaultStore, store: RetryStore) -> None:
        inner.inject(fail(on("put", at=1)))
        inner.inner.put("a", [b"theirs"])
        with pytest.raises(ConflictError):
            store.put("a", [b"ours"])

    def test_a_listing_that_breaks_off_goes_on_behind_its_last_key(self, time: FakeTime) -> None:
        class BreakingPages(MemoryStore):
            begins: list[str] = []  # noqa: RUF012

            def list(self, prefix: str = "", after: str = "") -> Iterator[StoredObject]:
                self.begins.append(after)
                for number, one in enumerate(super().list(prefix, after)):
                    if number == 2:
                        raise StorageError("no next page", retryable=True)
                    yield one

        inner = BreakingPages()
        for number in range(5):
            inner.put(f"m/{number}", [b""])
        store = RetryStore(inner, time.retry())
        assert [one.key for one in store.list("m/")] == [f"m/{number}" for number in range(5)]
        assert inner.begins == ["", "m/1", "m/3"]

    def test_a_listing_that_cannot_be_read_fails_at_its_reading(self, inner: FaultStore, store: RetryStore) -> None:
        inner.inject(fail(on("list"), refused))
        with pytest.raises(StorageError, match="no permission"):
            list(store.list())

    def test_deleted_keys_may_come_from_an_iterator(self, inner: FaultStore, store: RetryStore) -> None:
        keys: Sequence[str] = ["a", "b", "c"]
        for key in keys:
            inner.put(key, [b""])
        inner.inject(fail(on("delete", key="b", at=1)))
        store.delete(iter(keys))
        assert list(inner.list()) == []

    def test_it_is_named_as_the_store_and_closes_it(self) -> None:
        inner = MemoryStore("named")
        store = RetryStore(inner)
        assert store.url == inner.url
        store.close()
        with pytest.raises(StorageError, match="closed"):
            inner.get("a")

    def test_pauses_leave_the_random_numbers_of_the_training_alone(self, inner: FaultStore) -> None:
        inner.inject(fail(on("put", at=range(1, 4))))
        random.seed(7)
        before = random.getstate()
        RetryStore(inner, Retry(sleep=lambda _: None)).put("a", [b"1"])
        assert random.getstate() == before

    def test_default_pauses_grow(self) -> None:
        retry = Retry()
        longest = [min(retry.longest, retry.first * 2**tries) for tries in range(10)]
        assert all(a <= b for a, b in pairwise(longest))
        assert longest[-1] == retry.longest < retry.within
