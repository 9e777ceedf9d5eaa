"""The store protocol: bytes by key, in five operations and a close.

It must not know what the bytes mean, and retries nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class StoredObject:
    """A key and the object's size in bytes."""

    key: str
    size: int


class Store(Protocol):
    """Immutable objects by key; docs/format.md section 2 says what each operation guarantees. Thread-safe.

    Every operation raises StorageError where the store refuses or does not answer.
    """

    @property
    def url(self) -> str:
        """How a person names this store."""

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write the concatenation of ``parts``, durably. If the key exists with the same bytes (our own put whose
        answer was
        lost), nothing happens; with other bytes ConflictError is raised and nothing is changed (I2)."""

    def put_if_absent(self, key: str, parts: Sequence[Buffer]) -> bool:
        """Write like ``put`` unless the key exists. Of concurrent callers exactly one gets True."""

    def get(self, key: str, start: int = 0, end: int | None = None, into: memoryview | None = None) -> memoryview:
        """The bytes ``start:end`` of an object, read into ``into`` (writable, of exactly that length) if given.

        Raises:
            NotFoundError: no such key.
            CorruptionError: the object ends before ``end``.
        """

    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredObject]:
        """All objects whose key begins with ``prefix`` and is greater than ``after``, in ascending order of keys."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; one that does not exist is no error."""

    def close(self) -> None:
        """Release connections and files. Using the store afterwards is an error."""
