"""Nested state as JSON and tensors, and back (docs/format.md, section 8).

It must not know torch: the caller says what a tensor is and builds what is torch's. Nothing is pickled or evaluated.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from incremental_ckpt.errors import CorruptionError, SaveError
from incremental_ckpt.format.members import MalformedError, integer, number, written_float
from incremental_ckpt.format.sealed import MAX_DEPTH
from incremental_ckpt.model import DTYPE_BYTES

MAX_TREE_DEPTH = MAX_DEPTH - 3
"""Levels of JSON that a tree may take: it stands three levels deep in a rank manifest."""

AsTensor = Callable[[object], "object | None"]
Make = Callable[[str, Any], object]

_EXACT_INT = 2**53
_MAX_DIGITS = 4300  # Python converts no longer decimals
_DECIMAL = re.compile(r"0|-?[1-9][0-9]*")
_PLAIN_TYPES = frozenset({type(None), bool, str})


@dataclass(frozen=True)
class HostTensor:
    """A tensor in host memory: its bytes (format "B"), little-endian, in C order; ``dtype`` is a key of DTYPE_BYTES."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def to_tree(value: object, *, path: str, as_tensor: AsTensor) -> tuple[Any, list[object]]:
    """``value`` as JSON, and the tensors that the JSON names by index.

    Args:
        path: how messages name ``value``.
        as_tensor: gives a token (not None) for an object that is stored as a tensor, else None.

    Returns:
        The tree, and by index the tokens, or for numpy's arrays and scalars a little-endian ``np.ndarray`` in C order.
        An object that is met again has one index.

    Raises:
        SaveError: something that the format cannot carry, a cycle, or nesting beyond MAX_TREE_DEPTH; names the path.
    """
    writer = _Writer(as_tensor)
    return writer.write(value, path, 0), writer.tensors


def from_tree(tree: Any, tensors: Sequence[object], *, key: str, make: Make) -> object:
    """The value of which ``to_tree`` made ``tree``.

    Args:
        tensors: what each tensor becomes; numpy's arrays and scalars are made of them by ``np.asarray``.
        key: the object that holds the tree, for messages.
        make: builds what belongs to torch: ``("$size", [2, 3])``, ``("$dtype", "float32")``, ``("$device", "cpu")``.

    Raises:
        CorruptionError: not a tree.
    """
    try:
        return _Reader(tensors, make).read(tree, "tree", 0)
    except MalformedError as error:
        raise CorruptionError(
            f"{key} holds state that the format does not know: {error}. "
            "Restore the object from a copy, or resume from an ancestor",
            key=key,
            found=str(error),
        ) from error


class _Writer:
    def __init__(self, as_tensor: AsTensor) -> None:
        self.tensors: list[object] = []
        self._as_tensor = as_tensor
        self._indices: dict[int, int] = {}
        self._open: set[int] = set()

    def write(self, value: Any, path: str, depth: int) -> Any:
        """``value`` as JSON that stands inside ``depth`` levels of the tree."""
        kind = type(value)
        if (
            kind in _PLAIN_TYPES
            or (kind is int and abs(value) <= _EXACT_INT)
            or (kind is float and math.isfinite(value))
        ):
            return value
        if kind not in _CONTAINERS:
            written, levels = self._leaf(value, path)
            self._enter(path, depth + levels)
            return written
        if id(value) in self._open:
            raise SaveError(f"{path} contains itself: a cycle cannot be saved. Leave it out of the state")
        self._open.add(id(value))
        try:
            return self._container(value, path, depth)
        finally:
            self._open.remove(id(value))

    def _container(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind is list:
            return self._items(value, path, depth)
        if kind is tuple:
            return {"$tuple": self._items(value, path, depth + 1)}
        if kind is set or kind is frozenset:
            # Sorted, so that the same state gives the same bytes in every process.
            return {f"${kind.__name__}": sorted(self._items(value, path, depth + 1), key=json.dumps)}
        if kind is OrderedDict:
            return {"$ordereddict": self._pairs(value, path, depth + 1)}
        if all(type(name) is str and not name.startswith("$") for name in value):
            self._enter(path, depth + 1)
            if _plain(value.values()):
                return dict(value)
            return {name: self.write(member, f"{path}[{name!r}]", depth + 1) for name, member in value.items()}
        return {"$dict": self._pairs(value, path, depth + 1)}

    def _items(self, values: Collection[Any], path: str, depth: int) -> list[Any]:
        self._enter(path, depth + 1)
        if _plain(values):
            return list(values)
        return [self.write(value, f"{path}[{index}]", depth + 1) for index, value in enumerate(values)]

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[list[Any]]:
        self._enter(path, depth + 2)
        return [
            [
                self.write(name, f"{path} key {_shown(name)}", depth + 2),
                self.write(member, f"{path}[{_shown(name)}]", depth + 2),
            ]
            for name, member in value.items()
        ]

    def _leaf(self, value: Any, path: str) -> tuple[Any, int]:
        """What is neither plain nor a container, and how many levels of JSON it takes."""
        kind = type(value)
        if kind is int:
            # Python writes no longer decimals than it reads; 3 bits are less than a digit.
            if value.bit_length() > 3 * _MAX_DIGITS:
                raise SaveError(f"{path}: an int of {value.bit_length()} bits is too large to be saved")
            return {"$int": str(value)}, 1
        if kind is float:
            return written_float(value), 1
        if kind is complex:
            return {"$complex": [written_float(value.real), written_float(value.imag)]}, 3
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode("ascii")}, 1
        if kind is np.ndarray:
            return {"$ndarray": self._index(value, _little_endian(value, path))}, 1
        if isinstance(value, np.generic):
            return {"$scalar": self._index(value, _little_endian(np.asarray(value), path))}, 1
        match (kind.__module__, kind.__qualname__):
            case ("torch", "Size"):
                return {"$size": [int(length) for length in value]}, 2
            case ("torch", "dtype"):
                return {"$dtype": str(value).removeprefix("torch.")}, 1
            case ("torch", "device"):
                return {"$device": str(value)}, 1
        token = self._as_tensor(value)
        if token is None:
            raise SaveError(
                f"{path}: an object of type {kind.__module__}.{kind.__qualname__} cannot be saved. "
                "Turn it into numbers, strings, bytes, tensors and containers of these in state_dict()"
            )
        return {"$tensor": self._index(value, token)}, 1

    def _index(self, value: object, token: object) -> int:
        """The index of ``value``'s tensor. Told apart by id: all objects live as long as the state that holds them."""
        index = self._indices.setdefault(id(value), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(token)
        return index

    def _enter(self, path: str, depth: int) -> None:
        if depth > MAX_TREE_DEPTH:
            raise SaveError(f"{path} is nested too deep: state may take {MAX_TREE_DEPTH} levels of JSON. Flatten it")


class _Reader:
    def __init__(self, tensors: Sequence[object], make: Make) -> None:
        self._tensors = tensors
        self._make = make
        self._arrays: dict[int, npt.NDArray[Any]] = {}

    def read(self, tree: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise MalformedError(f"{path} is nested deeper than {MAX_DEPTH} levels")
        kind = type(tree)
        if kind in _PLAIN_TYPES or kind is int:
            return tree
        if kind is float:
            return number(tree, path)
        if kind is list:
            return self._items(tree, path, depth)
        if kind is not dict:
            raise MalformedError(f"{path} is a {kind.__name__}, which is not JSON")
        tag = next((name for name in tree if name.startswith("$")), None)
        if tag is None:
            return {name: self.read(member, f"{path}.{name}", depth + 1) for name, member in tree.items()}
        if len(tree) != 1:
            raise MalformedError(f"{path} has other members beside {tag[:40]!r}")
        return self._tagged(tag, tree[tag], path, depth + 1)

    def _items(self, items: Any, path: str, depth: int) -> list[Any]:
        if type(items) is not list:
            raise MalformedError(f"{path} is not an array")
        if _plain(items):
            return list(items)
        return [self.read(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(items)]

    def _tagged(self, tag: str, value: Any, path: str, depth: int) -> Any:
        match tag:
            case "$int":
                if type(value) is str and len(value) <= _MAX_DIGITS and _DECIMAL.fullmatch(value):
                    return int(value)
            case "$float":
                return number({"$float": value}, path)
            case "$complex":
                if type(value) is list and len(value) == 2:
                    return complex(number(value[0], path), number(value[1], path))
            case "$bytes":
                return _bytes(value, path)
            case "$tuple":
                return tuple(self._items(value, path, depth))
            case "$set":
                return set(self._distinct(self._items(value, path, depth), path))
            case "$frozenset":
                return frozenset(self._distinct(self._items(value, path, depth), path))
            case "$dict":
                return dict(self._pairs(value, path, depth))
            case "$ordereddict":
                return OrderedDict(self._pairs(value, path, depth))
            case "$tensor":
                return self._tensors[self._index(value, path)]
            case "$ndarray":
                return self._array(value, path)
            case "$scalar":
                array = self._array(value, path)
                if array.ndim == 0:
                    return array[()]
            case "$size" | "$dtype" | "$device":
                return self._made(tag, value, path)
        raise MalformedError(f"{path} is no valid {tag[:40]!r}")

    def _pairs(self, value: Any, path: str, depth: int) -> list[tuple[Any, Any]]:
        pairs = self._items(value, path, depth)
        if any(type(pair) is not list or len(pair) != 2 for pair in pairs):
            raise MalformedError(f"{path} is not an array of pairs")
        self._distinct([name for name, _ in pairs], path)
        return [(name, member) for name, member in pairs]

    def _distinct(self, values: list[Any], path: str) -> list[Any]:
        try:
            distinct = len(set(values)) == len(values)
        except TypeError as error:
            raise MalformedError(f"{path} has a key or an element that cannot be one ({error})") from error
        if not distinct:
            raise MalformedError(f"{path} has a key or an element twice")
        return values

    def _index(self, value: Any, path: str) -> int:
        return integer(value, path, 0, len(self._tensors) - 1)

    def _array(self, value: Any, path: str) -> npt.NDArray[Any]:
        index = self._index(value, path)
        if index not in self._arrays:
            self._arrays[index] = np.asarray(self._tensors[index])
        return self._arrays[index]

    def _made(self, tag: str, value: Any, path: str) -> object:
        if tag == "$size":
            value = [integer(length, path) for length in self._items(value, path, 0)]
        elif type(value) is not str:
            raise MalformedError(f"{path} is no valid {tag!r}")
        try:
            return self._make(tag, value)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
            raise MalformedError(f"{path} is no valid {tag!r}: {error}") from error


def _plain(values: Iterable[Any]) -> bool:
    """Whether all values are written and read as they are. Spares long lists of numbers a look at each."""
    kinds = set(map(type, values))
    if kinds <= _PLAIN_TYPES:
        return True
    if kinds == {int}:
        return bool(max(values) <= _EXACT_INT and min(values) >= -_EXACT_INT)
    return kinds == {float} and all(map(math.isfinite, values))


def _little_endian(array: npt.NDArray[Any], path: str) -> npt.NDArray[Any]:
    if array.dtype.kind not in "biufc" or array.dtype.name not in DTYPE_BYTES:
        raise SaveError(f"{path}: a numpy array of dtype {array.dtype} cannot be saved. Turn it into numbers or bytes")
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _bytes(value: Any, path: str) -> bytes:
    try:
        if type(value) is str:
            return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        pass  # not base64: as below
    raise MalformedError(f"{path} is no valid '$bytes'")


def _shown(name: object) -> str:
    text = repr(name) if type(name) in (str, int, float, bool, bytes, tuple, type(None)) else type(name).__name__
    return text if len(text) <= 80 else text[:77] + "..."


_CONTAINERS = frozenset({list, tuple, set, frozenset, dict, OrderedDict})
