"""Repeats what may succeed if tried again, with growing random pauses and a deadline; the only place that retries.

It must not know why an operation failed: StorageError.retryable was decided where that was known.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from incremental_ckpt.arguments import function, seconds
from incremental_ckpt.errors import StorageError
from incremental_ckpt.storage.base import Buffer, Store, StoredObject

T = TypeVar("T")
_MOST_DOUBLINGS = 30
# Of its own: the global generator belongs to the training, whose numbers must not depend on what was repeated (I8).
_CHANCE = random.SystemRandom()


class GivenUpError(StorageError):
    """The time for retries is up. Nobody further out tries again."""


@dataclass(frozen=True)
class Retry:
    """When to try again. The pause before try n+1 is a random share of ``first * 2**(n-1)``, at most ``longest``.

    Attributes:
        first: seconds, the longest pause before the second try.
        longest: seconds, the longest pause.
        within: seconds since the first try after which none begins; 0 never tries again.
        sleep, clock, uniform: time and chance (``uniform()`` in [0, 1)), for tests.
    """

    first: float = 0.2
    longest: float = 20.0
    within: float = 300.0
    sleep: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.monotonic
    uniform: Callable[[], float] = _CHANCE.random

    def __post_init__(self) -> None:
        for name in ("first", "longest", "within"):
            seconds(f"Retry.{name}", getattr(self, name))
        for name in ("sleep", "clock", "uniform"):
            function(f"Retry.{name}", getattr(self, name), "a function")

    def call(self, operation: Callable[[], T]) -> T:
        """The result of the first try that succeeds.

        Raises:
            StorageError: as the last try raised it, if it is not retryable or the time is up.
        """
        begun = self.clock()
        tries = 0
        while True:
            try:
                return operation()
            except StorageError as error:
                if not error.retryable or isinstance(error, GivenUpError):
                    raise
                tries += 1
                pause = self.uniform() * min(self.longest, self.first * 2 ** min(tries - 1, _MOST_DOUBLINGS))
                spent = self.clock() - begun
                if spent + pause >= self.within:
                    if tries == 1:
                        raise
                    told = f"{error} (given up after {tries} tries in {spent:.1f} s)"
                    raise GivenUpError(told, retryable=True) from error
            self.sleep(pause)


NO_RETRY = Retry(within=0.0)


class RetryStore:
    """A store whose operations are repeated while they fail with a retryable StorageError.

    After a lost answer the next try of ``put_if_absent`` finds the object that the first one wrote and returns False:
    who must know reads the object back, as Repository.commit does. A ``put`` compares by itself.
    """

    def __init__(self, inner: Store, retry: Retry | None = None) -> None:
        self.inner = inner
        self._retry = Retry() if retry is None else retry

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def read_only(self) -> bool:
        return bool(getattr(self.inner, "read_only", False))

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._retry.call(lambda: self.inner.put(key, parts))

    def put_if_absent(self, key: str, parts: Sequence[Buffer]) -> bool:
        return self._retry.call(lambda: self.inner.put_if_absent(key, parts))

    def get(self, key: str, start: int = 0, end: int | None = None, into: memoryview | None = None) -> memoryview:
        return self._retry.call(lambda: self.inner.get(key, start, end, into))

    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredObject]:
        return self._list(prefix, after, self._retry.call(lambda: self.inner.list(prefix, after)))

    def delete(self, keys: Iterable[str]) -> None:
        remaining = [*keys]
        self._retry.call(lambda: self.inner.delete(remaining))

    def close(self) -> None:
        self.inner.close()

    def _list(self, prefix: str, after: str, objects: Iterator[StoredObject]) -> Iterator[StoredObject]:
        """A listing that breaks off goes on behind the last key it gave, with all the time anew."""
        broken = False

        def following() -> StoredObject | None:
            nonlocal objects, broken
            try:
                if broken:
                    objects = self.inner.list(prefix, after)
                    broken = False
                return next(objects, None)
            except StorageError:
                broken = True
                raise

        while (found := self._retry.call(following)) is not None:
            after = found.key
            yield found
