"""The list of checkpoints, drawn: aligned columns, coloured on a terminal only.

It must not know repositories or stores. It does without rich's tables, which take several times as long as reading a
thousand manifests; rich itself is loaded for a terminal only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, TextIO

from incremental_ckpt.cli import text

if TYPE_CHECKING:
    from incremental_ckpt.cli.facts import Catalogue
    from incremental_ckpt.model import CheckpointInfo

Paint = Callable[[str, str], str]
"""``paint(text, style)``."""

STYLES = {"base": "cyan", "unreadable": "red"}
_GAP = "  "
_METRICS = 4
_KIND = 2
"""The column that is aligned to the left and has a style."""


def show_catalogue(url: str, found: Catalogue) -> None:
    paint = painter(sys.stdout)
    if not found.checkpoints and not found.unreadable:
        sys.stdout.write(f"{text.printable(url)} holds no checkpoint yet\n")
        return
    infos = found.checkpoints
    metrics = sorted({name for info in infos for name in info.metrics})
    columns = _columns(infos, metrics[:_METRICS])
    rows = [(info.seq, [cell(info) for _, cell in columns]) for info in infos]
    rows += [(seq, [str(seq), "-", "unreadable", *["-"] * (len(columns) - _KIND - 1)]) for seq, _ in found.unreadable]
    total = f"{text.count(len(infos), 'checkpoint')}, {text.size(sum(i.bytes for i in infos))}"
    if found.unreadable:
        total += f"; {len(found.unreadable)} unreadable"
    if len(metrics) > _METRICS:
        total += f"; {text.count(len(metrics) - _METRICS, 'more metric')} (--json)"
    lines = _lines([name for name, _ in columns], [cells for _, cells in sorted(rows)], paint)
    sys.stdout.write("\n".join([*lines, paint(total, "dim")]) + "\n")


def _columns(
    infos: Sequence[CheckpointInfo], metrics: Sequence[str]
) -> list[tuple[str, Callable[[CheckpointInfo], str]]]:
    columns: list[tuple[str, Callable[[CheckpointInfo], str]]] = [
        ("seq", lambda i: str(i.seq)),
        ("step", lambda i: str(i.step)),
        ("kind", lambda i: i.kind),
        ("parent", lambda i: "-" if i.parent is None else str(i.parent)),
        ("rows", lambda i: f"{i.rows:,}"),
        ("of all", lambda i: text.share(i.rows, i.table_rows)),
        ("size", lambda i: text.size(i.bytes)),
    ]
    if any(i.epoch is not None for i in infos):
        columns.append(("epoch", lambda i: "-" if i.epoch is None else str(i.epoch)))
    if any(i.loss is not None for i in infos):
        columns.append(("loss", lambda i: text.number(i.loss)))
    columns += [(text.printable(name), _metric(name)) for name in metrics]
    return [*columns, ("created (UTC)", lambda i: text.time(i.created))]


def _metric(name: str) -> Callable[[CheckpointInfo], str]:
    return lambda info: text.number(info.metrics.get(name))


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]], paint: Paint) -> Iterator[str]:
    widths = [max(map(text.width, column)) for column in zip(header, *rows, strict=True)]
    for place, cells in enumerate([header, *rows]):
        parts = []
        for column, cell in enumerate(cells):
            gap = " " * (widths[column] - text.width(cell))
            style = "bold" if place == 0 else STYLES.get(cell, "") if column == _KIND else ""
            shown = paint(cell, style) if style else cell
            parts.append(shown + gap if column == _KIND else gap + shown)
        yield _GAP.join(parts)


def painter(stream: TextIO) -> Paint:
    """Styles for a terminal, nothing for anything else."""
    if not stream.isatty():
        return lambda text, _: text
    from rich.text import Text

    from incremental_ckpt.cli.tables import console

    out = console(stream)

    @cache
    def paint(text: str, style: str) -> str:
        with out.capture() as captured:
            out.print(Text(text, style=style), end="")
        return captured.get()

    return paint
