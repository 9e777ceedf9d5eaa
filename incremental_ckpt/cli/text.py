"""Numbers, sizes, times and foreign text as people read them.

It must not know checkpoints or terminals.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from incremental_ckpt.units import size

__all__ = ["count", "number", "printable", "ranges", "share", "size", "time", "width"]


def printable(text: str) -> str:
    """Text on one line, in which nothing steers a terminal: names and messages in a store are anybody's."""
    return "".join(c if c.isprintable() else " " if c == "\n" else ascii(c)[1:-1] for c in text)


def share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"


def time(moment: datetime) -> str:
    """A UTC time to the second, without naming the zone."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def width(text: str) -> int:
    """Cells that it takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, neighbours drawn together: ``1-3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
