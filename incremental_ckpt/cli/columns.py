"""Aligned columns of text, whole ones only where a terminal is too narrow, and styles on a terminal only.

It must not know what the columns say. It does without rich, which takes longer to load than a thousand manifests to
read.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

import click

from incremental_ckpt.cli import text
from incremental_ckpt.cli.terminal import has_colours

Paint = Callable[[str, str], str]
"""``paint(text, style)``: the name of a colour, or one of the emphases."""

_EMPHASES = ("bold", "dim")
_GAP = "  "


@dataclass(frozen=True)
class Column:
    """
    Attributes:
        cells: one for each row.
        weight: columns of the least weight go first where a terminal is too narrow; 0: it never goes.
        left: its cells are aligned to the left.
        styles: by what a cell says.
    """

    name: str
    cells: Sequence[str]
    weight: int = 0
    left: bool = False
    styles: Callable[[str], str | None] | None = None

    @property
    def width(self) -> int:
        return max(text.width(self.name), max(map(text.width, self.cells), default=0))


def fitting(columns: Sequence[Column], width: int | None) -> list[Column]:
    """The columns that go into a line of so many characters (None: all); of equal weight the last goes first."""
    shown = list(columns)
    while width is not None and sum(column.width + len(_GAP) for column in shown) - len(_GAP) > width:
        lightest = min((column.weight for column in shown if column.weight), default=0)
        if not lightest:
            break
        shown.remove(next(column for column in reversed(shown) if column.weight == lightest))
    return shown


def lines(columns: Sequence[Column], paint: Paint) -> list[str]:
    """A header and one line for each row. Nothing stands behind the last column."""
    padded = []
    for place, column in enumerate(columns):
        width, last = column.width, place == len(columns) - 1
        cells = []
        for row, cell in enumerate((column.name, *column.cells)):
            gap = " " * (width - text.width(cell))
            style = "bold" if row == 0 else column.styles(cell) if column.styles is not None else None
            painted = paint(cell, style) if style else cell
            cells.append(painted + ("" if last else gap) if column.left else gap + painted)
        padded.append(cells)
    return [_GAP.join(row) for row in zip(*padded, strict=True)]


def too_narrow(columns: Sequence[Column], shown: Sequence[Column], paint: Paint) -> list[str]:
    """A line that names the columns that are not shown, if there are any."""
    left_out = [column.name for column in columns if column not in shown]
    return [paint(f"too narrow for: {', '.join(left_out)} (--json, or a pipe, has all)", "dim")] if left_out else []


def wrapped(line: str, width: int | None) -> list[str]:
    """Prose on as many lines as it takes, each as far indented as the first; None: on one."""
    if width is None:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line.strip(), max(width, 20), initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def width_of(stream: TextIO) -> int | None:
    """Characters in a line of a terminal; None for anything else: what is piped is never cut."""
    if not stream.isatty():
        return None
    import shutil  # loads every compressor

    return shutil.get_terminal_size().columns


def painter(stream: TextIO) -> Paint:
    """Styles for a terminal that has them, nothing for anything else."""
    if not has_colours(stream):
        return lambda text, _: text
    return lambda text, style: click.style(text, **{style: True}) if style in _EMPHASES else click.style(text, fg=style)
