"""Typed access to the members of parsed JSON, where every refusal names the place.

It must not know which objects there are, nor their keys in a store.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

MAX_INT = 2**63 - 1

_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")
_HEX = re.compile(r"[0-9a-f]+")
_SPECIAL_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

T = TypeVar("T")


class MalformedError(ValueError):
    """A member that is missing, of a wrong type or out of range. The message says which."""


class UnsupportedError(ValueError):
    """A member that a later version may know and this one must not skip."""


class Members:
    """One JSON object, and where in the document it stands."""

    __slots__ = ("_members", "where")

    def __init__(self, value: object, where: str = "") -> None:
        if not isinstance(value, dict):
            raise MalformedError(f"{where or 'the document'} is not an object")
        self._members: dict[str, Any] = value
        self.where = where

    def place(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def value(self, name: str) -> Any:
        try:
            return self._members[name]
        except KeyError:
            raise MalformedError(f"{self.place(name)} is missing") from None

    def integer(self, name: str, low: int = 0, high: int = MAX_INT) -> int:
        return integer(self.value(name), self.place(name), low, high)

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str):
            raise MalformedError(f"{self.place(name)} is not a string")
        return value

    def name(self, name: str) -> str:
        value = self.text(name)
        if not value:
            raise MalformedError(f"{self.place(name)} is empty")
        return value

    def hexadecimal(self, name: str, digits: int) -> str:
        value = self.text(name)
        if len(value) != digits or not _HEX.fullmatch(value):
            raise MalformedError(f"{self.place(name)} is not {digits} hex digits in lower case")
        return value

    def boolean(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool):
            raise MalformedError(f"{self.place(name)} is neither true nor false")
        return value

    def time(self, name: str) -> datetime:
        value = self.text(name)
        try:
            if _TIME.fullmatch(value):
                return datetime.fromisoformat(value)
        except ValueError:
            pass  # a 31st of February: no time, as below
        raise MalformedError(f"{self.place(name)} is not a UTC time such as 2026-01-31T12:00:00.000000Z")

    def number(self, name: str) -> float:
        return number(self.value(name), self.place(name))

    def items(self, name: str) -> list[Any]:
        value = self.value(name)
        if not isinstance(value, list):
            raise MalformedError(f"{self.place(name)} is not an array")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.value(name)
        if not isinstance(value, dict):
            raise MalformedError(f"{self.place(name)} is not an object")
        return value

    def object(self, name: str) -> Members:
        return Members(self.value(name), self.place(name))

    def objects(self, name: str) -> Iterator[Members]:
        place = self.place(name)
        for index, item in enumerate(self.items(name)):
            yield Members(item, f"{place}[{index}]")

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        """``read(name)``, or None where the member is null."""
        return None if self.value(name) is None else read(name)


def integer(value: object, place: str, low: int = 0, high: int = MAX_INT) -> int:
    if type(value) is not int:
        raise MalformedError(f"{place} is not an integer")
    if not low <= value <= high:
        shown = str(value) if abs(value) < 2**64 else "a number far beyond 64 bits"
        raise MalformedError(f"{place} is {shown}, which is not between {low} and {high}")
    return value


def number(value: object, place: str) -> float:
    """A JSON number or one of the floats that JSON lacks, ``{"$float": "nan" | "inf" | "-inf"}``."""
    if isinstance(value, dict) and len(value) == 1 and isinstance(value.get("$float"), str):
        special = _SPECIAL_FLOATS.get(value["$float"])
        if special is not None:
            return special
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            converted = float(value)
        except OverflowError:
            converted = math.inf
        if math.isfinite(converted):
            return converted
    raise MalformedError(f"{place} is not a number")


def written_float(value: float) -> float | dict[str, str]:
    """A float as the format writes it: itself, or an object where JSON lacks it."""
    if math.isfinite(value):
        return value
    return {"$float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}


def written_time(value: datetime) -> str:
    if value.tzinfo is None:
        raise ValueError(f"the time {value.isoformat()} has no time zone: give it in UTC")
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def written_plain(value: object) -> Any:
    """Containers of JSON values as the format writes them: floats that JSON lacks become objects, sequences arrays."""
    if isinstance(value, float):
        return written_float(value)
    if isinstance(value, Mapping):
        return {str(name): written_plain(member) for name, member in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [written_plain(item) for item in value]
    return value
