"""How every sealed document is read and written: sealed, of a known format, and under the key that it belongs to.

It must not know which documents there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from incremental_ckpt.errors import CorruptionError, FormatError
from incremental_ckpt.format.members import MalformedError, Members, UnsupportedError
from incremental_ckpt.format.sealed import FORMAT, seal, unseal


class Document(Protocol):
    @property
    def key(self) -> str: ...


D = TypeVar("D", bound=Document)


def write_document(members: dict[str, Any], parse: Callable[[Members], Document]) -> bytes:
    """Seal ``members``, having made sure that what is written can be read.

    Raises:
        ValueError: a reader would refuse them; the message says which member.
    """
    members = {"format": FORMAT, **members}
    parse(Members(members))
    return seal(members)


def read_document(raw: bytes | memoryview, key: str, parse: Callable[[Members], D]) -> D:
    """The document in ``raw``, which was read from ``key``.

    Raises:
        CorruptionError: not sealed, malformed, or the document of another key.
        FormatError: written by a later version.
    """
    members = Members(unseal(raw, key))
    try:
        members.integer("format", 1, FORMAT)
        document = parse(members)
    except MalformedError as error:
        raise CorruptionError(
            f"{key} is not what it should be: {error}. Restore the object from a copy, or resume from an ancestor",
            key=key,
            found=str(error),
        ) from error
    except UnsupportedError as error:
        raise FormatError(f"{key} needs a later version: {error}. Upgrade incremental_ckpt") from error
    if document.key != key:
        raise CorruptionError(
            f"{key} holds the object of another key, {document.key}: objects were swapped or renamed. "
            "Restore the object from a copy, or resume from an ancestor",
            key=key,
            expected=key,
            found=document.key,
        )
    return document
