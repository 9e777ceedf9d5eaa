"""The list of checkpoints, drawn: aligned columns, whole ones only, coloured on a terminal only.

It must not know repositories or stores. It does without rich, which takes longer to load than a thousand manifests to
read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import click

from incremental_ckpt.cli import text
from incremental_ckpt.cli.terminal import has_colours

if TYPE_CHECKING:
    from incremental_ckpt.cli.catalogue import Catalogue, Listed

Paint = Callable[[str, str], str]
"""``paint(text, style)``: the name of a colour, or one of the emphases."""

_EMPHASES = ("bold", "dim")
STYLES = {"base": "cyan", "unreadable": "red"}
_GAP = "  "
_METRICS = 4


@dataclass(frozen=True)
class _Column:
    """
    Attributes:
        cells: one for each row.
        weight: columns of the least weight go first where a terminal is too narrow; 0: it never goes.
        styled: its cells are aligned to the left and have styles.
    """

    name: str
    cells: Sequence[str]
    weight: int = 0
    styled: bool = False

    @property
    def width(self) -> int:
        return max(text.width(self.name), max(map(len, self.cells), default=0))


def show_catalogue(url: str, found: Catalogue) -> None:
    if not found.checkpoints and not found.unreadable:
        sys.stdout.write(f"{text.printable(url)} holds no checkpoint yet\n")
        return
    paint = _painter(sys.stdout)
    metrics = sorted({name for one in found.checkpoints for name in one.info.metrics})
    columns = _columns(found, metrics[:_METRICS])
    shown = columns
    if sys.stdout.isatty():
        import shutil  # loads every compressor

        shown = _fitting(columns, shutil.get_terminal_size().columns)
    left_out = [column.name for column in columns if column not in shown]
    last = [_total(found)]
    if len(metrics) > _METRICS:
        last.append(f"{text.count(len(metrics) - _METRICS, 'more metric')} (--json)")
    lines = [*_lines(shown, paint), paint("; ".join(last), "dim")]
    if left_out:
        lines.append(paint(f"too narrow for: {', '.join(left_out)} (--json, or a pipe, has all)", "dim"))
    sys.stdout.write("\n".join(lines) + "\n")


def _columns(found: Catalogue, metrics: Sequence[str]) -> list[_Column]:
    damaged = {one.seq for one in found.unreadable if one.equivalent}
    listed: dict[int, Listed | None] = {one.seq: None for one in found.unreadable if not one.equivalent}
    listed |= {one.info.seq: one for one in found.checkpoints}
    rows = [listed[seq] for seq in sorted(listed)]

    def cells(cell: Callable[[Listed], str]) -> list[str]:
        return ["-" if row is None else cell(row) for row in rows]

    columns = [
        _Column("seq", [str(seq) for seq in sorted(listed)]),
        _Column("step", cells(lambda one: str(one.info.step))),
        _Column("kind", ["unreadable" if row is None else row.info.kind for row in rows], styled=True),
        _Column("parent", cells(lambda one: _or_dash(one.info.parent)), 7),
        _Column("rows", cells(lambda one: f"{one.info.rows:,}"), 3),
        _Column("of all", cells(lambda one: text.share(one.info.rows, one.info.table_rows)), 2),
        _Column("size", cells(lambda one: text.size(one.info.bytes))),
    ]
    infos = [one.info for one in found.checkpoints]
    if damaged or any(one.equivalent_bytes is not None for one in found.checkpoints):
        columns.append(_Column("as base", cells(lambda one: _equivalent(one, damaged)), 8))
    if any(info.epoch is not None for info in infos):
        columns.append(_Column("epoch", cells(lambda one: _or_dash(one.info.epoch)), 1))
    if any(info.loss is not None for info in infos):
        columns.append(_Column("loss", cells(lambda one: text.number(one.info.loss)), 6))
    for place, name in enumerate(metrics):
        columns.append(_Column(text.printable(name), cells(_metric(name)), 4 if place else 5))
    return [*columns, _Column("created (UTC)", cells(lambda one: text.time(one.info.created)))]


def _fitting(columns: Sequence[_Column], width: int) -> list[_Column]:
    """The columns that go into a line of so many characters; of equal weight the last goes first."""
    shown = list(columns)
    while sum(column.width + len(_GAP) for column in shown) - len(_GAP) > width:
        lightest = min((column.weight for column in shown if column.weight), default=0)
        if not lightest:
            break
        shown.remove(next(column for column in reversed(shown) if column.weight == lightest))
    return shown


def _lines(columns: Sequence[_Column], paint: Paint) -> list[str]:
    widths = [column.width for column in columns]
    header = []
    for column, width in zip(columns, widths, strict=True):
        gap = " " * (width - text.width(column.name))
        name = paint(column.name, "bold")
        header.append(name + gap if column.styled else gap + name)
    padded = [
        [_painted(cell, paint) + " " * (width - len(cell)) for cell in column.cells]
        if column.styled
        else [cell.rjust(width) for cell in column.cells]
        for column, width in zip(columns, widths, strict=True)
    ]
    return [_GAP.join(header), *map(_GAP.join, zip(*padded, strict=True))]


def _painted(cell: str, paint: Paint) -> str:
    style = STYLES.get(cell)
    return paint(cell, style) if style else cell


def _total(found: Catalogue) -> str:
    checkpoints = found.checkpoints
    equivalents = [one.equivalent_bytes for one in checkpoints if one.equivalent_bytes is not None]
    stored = text.size(sum(one.stored_bytes for one in checkpoints))
    total = f"{text.count(len(checkpoints), 'checkpoint')}, {stored}"
    if equivalents:
        total += f", {text.size(sum(equivalents))} of it in {text.count(len(equivalents), 'equivalent base')}"
    unreadable = sum(not one.equivalent for one in found.unreadable)
    return f"{total}; {unreadable} unreadable" if unreadable else total


def _equivalent(one: Listed, damaged: set[int]) -> str:
    if one.info.seq in damaged:
        return "unreadable"
    return "-" if one.equivalent_bytes is None else text.size(one.equivalent_bytes)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _metric(name: str) -> Callable[[Listed], str]:
    return lambda one: text.number(one.info.metrics.get(name))


def _painter(stream: TextIO) -> Paint:
    """Styles for a terminal that has them, nothing for anything else."""
    if not has_colours(stream):
        return lambda text, _: text
    return lambda text, style: click.style(text, **{style: True}) if style in _EMPHASES else click.style(text, fg=style)
