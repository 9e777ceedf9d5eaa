"""The list of checkpoints, drawn: aligned columns, whole ones only, coloured on a terminal only.

It must not know repositories or stores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from incremental_ckpt.cli import text
from incremental_ckpt.cli.columns import Column, fitting, lines, painter, too_narrow, width_of

if TYPE_CHECKING:
    from incremental_ckpt.cli.catalogue import Catalogue, Listed

STYLES = {"base": "cyan", "unreadable": "red"}
_METRICS = 4


def show_catalogue(url: str, found: Catalogue) -> None:
    if not found.checkpoints and not found.unreadable:
        sys.stdout.write(f"{text.printable(url)} holds no checkpoint yet\n")
        return
    paint = painter(sys.stdout)
    metrics = sorted({name for one in found.checkpoints for name in one.info.metrics})
    columns = _columns(found, metrics[:_METRICS])
    shown = fitting(columns, width_of(sys.stdout))
    last = [_total(found)]
    if len(metrics) > _METRICS:
        last.append(f"{text.count(len(metrics) - _METRICS, 'more metric')} (--json)")
    drawn = [*lines(shown, paint), paint("; ".join(last), "dim"), *too_narrow(columns, shown, paint)]
    sys.stdout.write("\n".join(drawn) + "\n")


def _columns(found: Catalogue, metrics: Sequence[str]) -> list[Column]:
    damaged = {one.seq for one in found.unreadable if one.equivalent}
    listed: dict[int, Listed | None] = {one.seq: None for one in found.unreadable if not one.equivalent}
    listed |= {one.info.seq: one for one in found.checkpoints}
    rows = [listed[seq] for seq in sorted(listed)]

    def cells(cell: Callable[[Listed], str]) -> list[str]:
        return ["-" if row is None else cell(row) for row in rows]

    columns = [
        Column("seq", [str(seq) for seq in sorted(listed)]),
        Column("step", cells(lambda one: str(one.info.step))),
        Column("kind", ["unreadable" if row is None else row.info.kind for row in rows], left=True, styles=STYLES.get),
        Column("parent", cells(lambda one: _or_dash(one.info.parent)), 7),
        Column("rows", cells(lambda one: f"{one.info.rows:,}"), 3),
        Column("of all", cells(lambda one: text.share(one.info.rows, one.info.table_rows)), 2),
        Column("size", cells(lambda one: text.size(one.info.bytes))),
    ]
    infos = [one.info for one in found.checkpoints]
    if damaged or any(one.equivalent_bytes is not None for one in found.checkpoints):
        columns.append(Column("as base", cells(lambda one: _equivalent(one, damaged)), 8))
    if any(info.epoch is not None for info in infos):
        columns.append(Column("epoch", cells(lambda one: _or_dash(one.info.epoch)), 1))
    if any(info.loss is not None for info in infos):
        columns.append(Column("loss", cells(lambda one: text.number(one.info.loss)), 6))
    for place, name in enumerate(metrics):
        columns.append(Column(text.printable(name), cells(_metric(name)), 4 if place else 5))
    return [*columns, Column("created (UTC)", cells(lambda one: text.time(one.info.created)))]


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
