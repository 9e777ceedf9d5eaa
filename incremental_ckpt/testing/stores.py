"""Stores around a store: one that injectors may disturb, one whose process dies, one that remembers what was done.

They must not know what the bytes mean.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from typing import Any, Literal, TypeVar

from incremental_ckpt.errors import CheckpointError
from incremental_ckpt.storage import Buffer, Store, StoredObject

Kind = Literal["put", "put_if_absent", "get", "list", "delete"]
WRITES: tuple[Kind, ...] = ("put", "put_if_absent", "delete")


@dataclass(frozen=True)
class Op:
    """One operation on one key; a delete of several keys is several operations.

    Attributes:
        key: the key, or the prefix of a list.
        index: its number among all operations of the wrapped store, from 1.
    """

    kind: Kind
    key: str
    index: int
    parts: Sequence[Buffer] = field(default=(), repr=False, compare=False)
    start: int = field(default=0, repr=False)
    end: int | None = field(default=None, repr=False)
    into: memoryview | None = field(default=None, repr=False, compare=False)
    after: str = field(default="", repr=False)


Perform = Callable[[Op], Any]
Injector = Callable[[Op, Perform], Any]
"""Stands between an operation and the store: calls ``perform(op)``, or not, or later, or with another op, and returns
or changes its result (``list`` gives a list of StoredObject)."""

AnyInjector = TypeVar("AnyInjector", bound=Injector)


class FaultStore:
    """A store whose operations pass through injectors, the first one outermost. Without any it changes nothing."""

    def __init__(self, inner: Store, *injectors: Injector) -> None:
        self.inner = inner
        self._injectors = list(injectors)
        self._indices = count(1)

    def inject(self, injector: AnyInjector) -> AnyInjector:
        """Add an injector, from the next operation on; it is handed back."""
        self._injectors.append(injector)
        return injector

    def heal(self) -> None:
        """Drop all injectors, from the next operation on."""
        self._injectors.clear()

    @property
    def url(self) -> str:
        return self.inner.url

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._do(Op("put", key, next(self._indices), parts))

    def put_if_absent(self, key: str, parts: Sequence[Buffer]) -> bool:
        return bool(self._do(Op("put_if_absent", key, next(self._indices), parts)))

    def get(self, key: str, start: int = 0, end: int | None = None, into: memoryview | None = None) -> memoryview:
        found: memoryview = self._do(Op("get", key, next(self._indices), (), start, end, into))
        return found

    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredObject]:
        return iter(self._do(Op("list", prefix, next(self._indices), after=after)))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._do(Op("delete", key, next(self._indices)))

    def close(self) -> None:
        self.inner.close()

    def _do(self, op: Op) -> Any:
        perform: Perform = self._perform
        for injector in reversed(self._injectors):
            perform = partial(_through, injector, perform)
        return perform(op)

    def _perform(self, op: Op) -> Any:
        match op.kind:
            case "put":
                return self.inner.put(op.key, op.parts)
            case "put_if_absent":
                return self.inner.put_if_absent(op.key, op.parts)
            case "get":
                return self.inner.get(op.key, op.start, op.end, op.into)
            case "list":
                return [*self.inner.list(op.key, op.after)]
            case "delete":
                return self.inner.delete([op.key])


def _through(injector: Injector, perform: Perform, op: Op) -> Any:
    return injector(op, perform)


class Crash(BaseException):
    """The process is dead. Not an Exception: no ``except Exception`` outlives a SIGKILL either."""


class CrashStore(FaultStore):
    """The view of a process that dies at its ``die_at``-th write (put, put_if_absent, each key of a delete).

    That write raises Crash, after it took effect (``landed``) or before, and so does everything afterwards, in every
    thread. ``die_at=0`` never dies; ``writes`` then tells how many there are to die at. The inner store outlives the
    process: ``close`` leaves it open.
    """

    def __init__(self, inner: Store, die_at: int = 0, landed: bool = False) -> None:
        super().__init__(inner, self._step)
        self.writes = 0
        self.crashed = False
        self._die_at = die_at
        self._landed = landed
        self._lock = threading.Lock()

    def close(self) -> None:
        pass

    def _step(self, op: Op, perform: Perform) -> Any:
        with self._lock:
            if self.crashed:
                raise Crash(f"the process died before {op}")
            if op.kind in WRITES:
                self.writes += 1
                self.crashed = self.writes == self._die_at
            dying = self.crashed
        if not dying:
            return perform(op)
        if self._landed:
            with suppress(CheckpointError):  # the dead do not hear that they were refused
                perform(op)
        raise Crash(f"the process died {'just after' if self._landed else 'at'} write {self._die_at}: {op}")


@dataclass(frozen=True)
class Traced:
    """An operation that returned: when it began and ended on the trace's own clock, and the bytes that it moved."""

    op: Op
    began: int
    ended: int
    size: int


class TracingStore(FaultStore):
    """Remembers the operations that returned, in the order in which they ended."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, self._step)
        self.trace: MutableSequence[Traced] = []
        self._clock = count(1)
        self._lock = threading.Lock()

    def find(self, kind: Kind | None = None, key: str = "*") -> Sequence[Traced]:
        """The operations of a kind whose key matches a glob pattern (``*`` also matches ``/``)."""
        return [one for one in self.trace if kind in (None, one.op.kind) and fnmatchcase(one.op.key, key)]

    def moved(self, kind: Kind, key: str = "*") -> int:
        """Bytes written (put, put_if_absent) or read (get)."""
        return sum(one.size for one in self.find(kind, key))

    def _step(self, op: Op, perform: Perform) -> Any:
        with self._lock:
            began = next(self._clock)
        result = perform(op)
        read = result.nbytes if isinstance(result, memoryview) else 0
        size = read + sum(memoryview(part).nbytes for part in op.parts)
        with self._lock:
            self.trace.append(Traced(replace(op, parts=(), into=None), began, next(self._clock), size))
        return result
