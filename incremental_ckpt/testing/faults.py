"""Injectors for a FaultStore: what disks and networks do to a store.

They must not know what the bytes mean.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from incremental_ckpt.errors import StorageError
from incremental_ckpt.storage import StoredObject
from incremental_ckpt.testing.stores import WRITES, Injector, Kind, Op, Perform

When = Callable[[Op], bool]


def on(kind: Kind | Collection[Kind] | None = None, key: str = "*", at: int | Container[int] | None = None) -> When:
    """A condition: operations of a kind, whose key matches a glob pattern (``*`` also matches ``/``), of these only the
    ``at``-th (from 1; a number, or a range or set of them). It counts, so each injector needs its own."""
    kinds = {kind} if isinstance(kind, str) else kind
    lock = threading.Lock()
    matched = 0

    def when(op: Op) -> bool:
        nonlocal matched
        if (kinds is not None and op.kind not in kinds) or not fnmatchcase(op.key, key):
            return False
        with lock:
            matched += 1
            number = matched
        return at is None or (number == at if isinstance(at, int) else number in at)

    return when


def fail(when: When, error: Callable[[Op], Exception] | None = None, *, landed: bool = False) -> Injector:
    """Raise an error (a retryable StorageError) instead of the operation, or after it took effect: a lost answer."""

    def injector(op: Op, perform: Perform) -> Any:
        if not when(op):
            return perform(op)
        if landed:
            perform(op)
        raise error(op) if error else StorageError(f"injected: no answer to {op}", retryable=True)

    return injector


def short_read(when: When, keep: int) -> Injector:
    """Cut reads to their first ``keep`` bytes, as a store does that breaks its word."""

    def injector(op: Op, perform: Perform) -> Any:
        found = perform(op)
        return found[:keep] if op.kind == "get" and when(op) else found

    return injector


def damage(when: When, at: int = 0, mask: int = 1) -> Injector:
    """Flip bits of byte ``at`` of an object (negative: from the end of what is read) in each read that covers it."""

    def injector(op: Op, perform: Perform) -> Any:
        found = perform(op)
        if op.kind != "get" or not when(op):
            return found
        place = at - op.start if at >= 0 else found.nbytes + at
        if not 0 <= place < found.nbytes:
            return found
        flipped = found if op.into is not None else memoryview(bytearray(found))
        flipped[place] ^= mask
        return flipped

    return injector


class LateWrites:
    """Writes that get no answer (a retryable StorageError) and take effect only when ``land_late`` is called."""

    def __init__(self, when: When) -> None:
        self.pending: list[tuple[Op, Perform]] = []
        self._when = when

    def __call__(self, op: Op, perform: Perform) -> Any:
        if op.kind not in WRITES or not self._when(op):
            return perform(op)
        # The caller reuses its buffers once it has its error.
        self.pending.append((replace(op, parts=[bytes(part) for part in op.parts]), perform))
        raise StorageError(f"injected: no answer to {op}", retryable=True)

    def land_late(self) -> Sequence[Any]:
        """Let all pending writes take effect; returns their answers, which nobody waits for any more."""
        pending, self.pending = self.pending, []
        return [perform(op) for op, perform in pending]


class Stall:
    """Operations that neither fail nor return until ``release`` is called.

    Attributes:
        reached: set when the first operation hangs.
    """

    def __init__(self, when: When, timeout: float = 60.0) -> None:
        self.reached = threading.Event()
        self._released = threading.Event()
        self._when = when
        self._timeout = timeout

    def __call__(self, op: Op, perform: Perform) -> Any:
        if self._when(op):
            self.reached.set()
            if not self._released.wait(self._timeout):
                raise AssertionError(f"nobody released {op} within {self._timeout} s")
        return perform(op)

    def release(self) -> None:
        self._released.set()


class LateListing:
    """Lists do not show the keys of the newest ``newest`` writes: a store weaker than docs/format.md asks for."""

    def __init__(self, newest: int) -> None:
        self._newest = newest
        self._written: list[str] = []

    def __call__(self, op: Op, perform: Perform) -> Any:
        result = perform(op)
        if op.kind in ("put", "put_if_absent"):
            self._written.append(op.key)
        if op.kind != "list" or not self._newest:
            return result
        hidden = set(self._written[-self._newest :])
        objects: Sequence[StoredObject] = result
        return [one for one in objects if one.key not in hidden]
