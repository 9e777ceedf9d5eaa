"""What a caller may have given wrongly: checked where it is given, told by the argument's name.

It must not know what becomes of the arguments, and loads no torch.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")

Progress = Callable[[int, int], None]
"""``progress(bytes done, bytes in all)`` of something that takes its time."""

REPOSITORY = "a Repository, as Repository(open_store('runs/17')) is one"
"""What a Repository is, for ``an``."""


def policies(name: str, given: Any, method: str, example: str, *, least: int = 0) -> tuple[Any, ...]:
    """One policy or several as a tuple.

    Raises:
        TypeError: something among them has no such method, or is a class instead of an object.
        ValueError: fewer than ``least``.
    """
    found = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else (given,)
    for policy in found:
        if isinstance(policy, type) or not callable(getattr(policy, method, None)):
            raise TypeError(f"{name} takes a policy such as {example}, or a list of them, not {policy!r}")
    if len(found) < least:
        raise ValueError(f"{name} takes at least one policy, such as {example}, not none")
    return found


def one_of(name: str, value: Any, allowed: Sequence[str]) -> Any:
    """``value``. Raises ValueError where it is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    return value


def codec(name: str, value: object, names: Collection[str], refused: Mapping[str, str] = MappingProxyType({})) -> None:
    """
    Args:
        refused: names of other codecs, and why they are not among these.

    Raises:
        TypeError: ``value`` is no name.
        ValueError: none of these names.
    """
    known = ", ".join(repr(each) for each in sorted(names))
    if not isinstance(value, str):
        raise TypeError(f"{name} takes the name of a codec, one of {known}, not {value!r}")
    if value not in names:
        why = {"auto": "'auto' is for weights only", **refused}.get(value)
        raise ValueError(f"{name} must be one of {known}, not {value!r}" + (f"; {why}" if why else ""))


def flag(name: str, value: object) -> bool:
    """``value``. Raises TypeError for anything but True and False: what is merely true or false may be meant otherwise,
    as "no" is."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} takes True or False, not {value!r}")
    return value


def function(name: str, value: Any, what: str) -> Any:
    """``value``. Raises TypeError where it cannot be called."""
    if not callable(value):
        raise TypeError(f"{name} takes {what}, not {type(value).__name__}")
    return value


def progress_function(value: Any) -> Progress | None:
    """``value``, which may be None. Raises TypeError where it cannot be called."""
    if value is None:
        return None
    found: Progress = function("progress", value, "a function of bytes done and bytes in all")
    return found


def path(name: str, value: Any) -> Path:
    """
    Raises:
        TypeError: neither a str nor a path of text.
        ValueError: empty, which would be the folder that the process happens to be in.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"{name} takes a path, not {value!r}")
    if not text:
        raise ValueError(f"{name} takes a path, not an empty string")
    return Path(text)


def seconds(name: str, value: Any) -> float:
    """
    Raises:
        TypeError: not a number.
        ValueError: negative, or not a number after all (nan).
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} takes a number of seconds, not {value!r}")
    if not float(value) >= 0:
        raise ValueError(f"{name} takes 0 seconds or more, not {value!r}")
    return float(value)


def whole(name: str, value: int) -> int:
    """As a plain int, also numpy's.

    Raises:
        TypeError: not a whole number.
        ValueError: negative, or more than a manifest can hold.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError as cause:
        raise TypeError(f"{name} must be an int, not {value!r}") from cause
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{name} must lie between 0 and 2**63 - 1, not {value!r}")
    return number


def numbers(name: str, values: Mapping[str, float | torch.Tensor] | None) -> dict[str, float]:
    """Numbers by name. Raises TypeError for anything else."""
    if not isinstance(values, Mapping | None) or not all(isinstance(key, str) for key in values or {}):
        raise TypeError(f"{name} takes numbers by name, as in {name}={{'auc': 0.79}}, not {values!r}")
    return {key: number(f"{name}[{key!r}]", value) for key, value in (values or {}).items()}


def an(kind: type[_T], name: str, value: object, example: str) -> _T:
    """``value``. Raises TypeError where it is of another type."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} takes {example}, not {value!r}")
    return value


_NO_NUMBERS = (bool, str, bytes, bytearray)
"""What float() takes all the same."""


def no_mistake(loss: object, metrics: object) -> None:
    """Raises TypeError for a loss or a metric that is plainly no number. No tensor is read, which waits for its
    device."""
    metrics = metrics if isinstance(metrics, Mapping) else {}
    for name, value in (("loss", loss), *((f"metrics[{key!r}]", value) for key, value in metrics.items())):
        if isinstance(value, _NO_NUMBERS):
            raise _no_number(name, value)


def number(name: str, value: float | torch.Tensor) -> float:
    """As a float; a tensor of one element is read, which waits for its device.

    Raises:
        TypeError: not a number.
    """
    item = getattr(value, "item", None)  # float() of a tensor that has a gradient warns
    try:
        found = item() if callable(item) else value
        number = None if isinstance(found, _NO_NUMBERS) else float(found)
    except (TypeError, ValueError, OverflowError, RuntimeError) as cause:
        raise _no_number(name, value) from cause
    if number is None:
        raise _no_number(name, value)
    return number


def _no_number(name: str, value: object) -> TypeError:
    return TypeError(f"{name} must be a number or a tensor of one element, not {value!r}")


def state_objects(state: Mapping[str, Any]) -> dict[str, Any]:
    """Objects that can be saved, by name.

    Raises:
        TypeError: no mapping of names, or one of them lacks ``state_dict()`` or ``load_state_dict()``.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state takes objects by name, as in state={{'reader': reader}}, not {type(state).__name__}")
    for name, thing in state.items():
        if not isinstance(name, str):
            raise TypeError(f"state takes objects by name: {name!r} is not a string")
        with_state(f"state[{name!r}]", thing)
    return dict(state)


def with_state(name: str, thing: object, also: Sequence[str] = ()) -> None:
    """
    Args:
        also: methods that it is to have besides ``state_dict()`` and ``load_state_dict()``.

    Raises:
        TypeError: it lacks one, or is a class instead of an object.
    """
    methods = (*also, "state_dict", "load_state_dict")
    *others, last = (f"{method}()" for method in methods)
    if isinstance(thing, type):
        raise TypeError(f"{name} takes an object with {', '.join(others)} and {last}, not the class {thing.__name__}")
    missing = [f"{method}()" for method in methods if not callable(getattr(thing, method, None))]
    if not missing:
        return
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(thing).__mro__}
    instead = (
        ": give torchdata's StatefulDataLoader (torchdata.stateful_dataloader), which takes the same arguments"
        if "torch.utils.data.dataloader.DataLoader" in kinds
        else ""
    )
    raise TypeError(
        f"{name} takes an object with {', '.join(others)} and {last}; a {type(thing).__name__} has no "
        f"{' and no '.join(missing)}{instead}"
    )
