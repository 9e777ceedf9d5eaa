"""A store in the memory of this process, for tests and trials; nothing in it outlives the process.

It must not know what the bytes mean.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from incremental_ckpt.errors import ConflictError, NotFoundError
from incremental_ckpt.storage.access import Access
from incremental_ckpt.storage.arguments import byte_views, range_end, read_target
from incremental_ckpt.storage.base import Buffer, StoredObject


@dataclass
class _Objects:
    by_key: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_NAMED: dict[str, _Objects] = {}
_NAMED_LOCK = threading.Lock()


class MemoryStore:
    """Stores of the same name share their objects; one without a name has its own."""

    def __init__(self, name: str = "") -> None:
        if not isinstance(name, str):
            raise TypeError(f"name takes a str, not {name!r}")
        self._name = name
        self._access = Access(self.url)
        if name:
            with _NAMED_LOCK:
                self._objects = _NAMED.setdefault(name, _Objects())
        else:
            self._objects = _Objects()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        value = self._joined(key, parts)
        with self._objects.lock:
            if self._objects.by_key.setdefault(key, value) != value:
                raise ConflictError(
                    f"cannot write {key} to {self.url}: it exists with other bytes, and objects are never overwritten. "
                    "Another job writes to this store: stop one of them"
                )

    def put_if_absent(self, key: str, parts: Sequence[Buffer]) -> bool:
        value = self._joined(key, parts)
        with self._objects.lock:
            return self._objects.by_key.setdefault(key, value) is value

    def get(self, key: str, start: int = 0, end: int | None = None, into: memoryview | None = None) -> memoryview:
        self._access.check_key(key)
        with self._objects.lock:
            value = self._objects.by_key.get(key)
        if value is None:
            raise NotFoundError(f"no object {key} in {self.url}", key=key)
        found = memoryview(value)[start : range_end(key, len(value), start, end)]
        if into is None:
            return found
        target = read_target(key, into, found.nbytes)
        if found.nbytes:
            target[:] = found
        return target

    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredObject]:
        self._access.check_open()
        with self._objects.lock:
            found = [
                StoredObject(key, len(value))
                for key, value in self._objects.by_key.items()
                if key > after and key.startswith(prefix)
            ]
        return iter(sorted(found, key=lambda one: one.key))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._access.check_key(key)
            with self._objects.lock:
                self._objects.by_key.pop(key, None)

    def close(self) -> None:
        self._access.closed = True

    def _joined(self, key: str, parts: Sequence[Buffer]) -> bytes:
        self._access.check_key(key)
        # A copy of its own, also of a single part: put_if_absent tells by identity whose bytes were kept.
        return bytes(bytearray().join(byte_views(parts)))
