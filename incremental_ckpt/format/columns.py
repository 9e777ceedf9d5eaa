"""Typed access to the members of many JSON objects of one kind, column by column; every refusal names the place.

It must not know which objects there are, nor their keys in a store.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from typing import Any, TypeVar

from incremental_ckpt.format.members import MAX_INT, Members

_HEX = re.compile(r"[0-9a-f]*")

Bound = int | Sequence[int]
T = TypeVar("T")


class Columns:
    """JSON objects of one kind, and where in the document each of them stands.

    A column is looked at as a whole, which costs a fraction of reading its members one by one. Where it does not pass,
    ``Members`` reads them, which is what decides, and names the first that is refused.

    Args:
        place: of the object with that index.
    """

    __slots__ = ("_items", "place")

    def __init__(self, items: Sequence[Any], place: Callable[[int], str]) -> None:
        self._items = items
        self.place = place
        if not _all_of(items, dict):
            list(self.each())

    @classmethod
    def of(cls, members: Members, name: str) -> Columns:
        """The objects in an array."""
        items, place = members.items(name), members.place(name)
        return cls(items, lambda index: f"{place}[{index}]")

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Members:
        return Members(self._items[index], self.place(index))

    def each(self) -> Iterator[Members]:
        return map(self.__getitem__, range(len(self._items)))

    def integers(self, name: str, low: Bound = 0, high: Bound = MAX_INT) -> list[int]:
        """Args: low, high: of all, or of each."""
        column = self._column(name, int)
        if column is not None and _at_least(column, low) and _at_most(column, high):
            return column
        bounds = zip(self.each(), _one_each(low), _one_each(high), strict=False)
        return [members.integer(name, at_least, at_most) for members, at_least, at_most in bounds]

    def texts(self, name: str) -> list[str]:
        column = self._column(name, str)
        return column if column is not None else [members.text(name) for members in self.each()]

    def names(self, name: str) -> list[str]:
        column = self._column(name, str)
        return column if column is not None and all(column) else [members.name(name) for members in self.each()]

    def hexadecimals(self, name: str, digits: int) -> list[str]:
        column = self._column(name, str)
        if column is not None and set(map(len, column)) <= {digits} and _HEX.fullmatch("".join(column)):
            return column
        return [members.hexadecimal(name, digits) for members in self.each()]

    def booleans(self, name: str, default: bool) -> list[bool]:
        """``default`` where there is no such member."""
        column = [item.get(name, default) for item in self._items]
        if _all_of(column, bool):
            return column
        return [members.boolean(name) if name in members else default for members in self.each()]

    def arrays(self, name: str) -> list[list[Any]]:
        column = self._column(name, list)
        return column if column is not None else [members.items(name) for members in self.each()]

    def objects(self, name: str) -> Columns:
        """The object that each has as a member."""
        column = self._column(name, dict)
        if column is None:
            column = [members.mapping(name) for members in self.each()]
        return Columns(column, lambda index: f"{self.place(index)}.{name}")

    def lists(self, name: str) -> tuple[Columns, list[range]]:
        """The objects in the arrays that each has as a member, in one row, and which of them are whose."""
        arrays = self.arrays(name)
        ends = list(accumulate(map(len, arrays)))
        spans = list(map(range, [0, *ends[:-1]], ends))

        def place(index: int) -> str:
            owner = bisect_right(ends, index)
            return f"{self.place(owner)}.{name}[{index - spans[owner].start}]"

        return Columns(list(chain.from_iterable(arrays)), place), spans

    def having(self, name: str) -> list[bool]:
        return [name in item for item in self._items]

    def chosen(self, indices: Sequence[int]) -> Columns:
        return Columns([self._items[i] for i in indices], lambda index: self.place(indices[index]))

    def _column(self, name: str, kind: type[T]) -> list[T] | None:
        """None where a member is missing or of another type."""
        try:
            column = list(map(operator.itemgetter(name), self._items))
        except KeyError:
            return None
        return column if _all_of(column, kind) else None


def from_columns(fact: type[T], *columns: Sequence[object]) -> list[T]:
    """A frozen dataclass with slots out of each row of the columns, which are its fields in order. The constructor does
    the same, but with a call of Python for each object and each of its fields, which takes five times as long."""
    made = list(map(object.__new__, repeat(fact, len(columns[0]))))
    for name, column in zip(fact.__slots__, columns, strict=True):  # type: ignore[attr-defined]
        deque(map(getattr(fact, name).__set__, made, column), maxlen=0)
    return made


def _all_of(column: Sequence[object], kind: type) -> bool:
    return set(map(type, column)) <= {kind}


def _one_each(bound: Bound) -> Iterator[int]:
    return repeat(bound) if isinstance(bound, int) else iter(bound)


def _at_least(column: Sequence[int], low: Bound) -> bool:
    return not column or (min(column) >= low if isinstance(low, int) else all(map(operator.ge, column, low)))


def _at_most(column: Sequence[int], high: Bound) -> bool:
    return not column or (max(column) <= high if isinstance(high, int) else all(map(operator.le, column, high)))
