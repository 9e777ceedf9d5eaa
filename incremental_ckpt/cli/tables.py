"""Facts drawn for people: aligned tables, colours on a terminal only.

It must not know repositories or stores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from incremental_ckpt.cli import text
from incremental_ckpt.cli.catalogue_table import STYLES
from incremental_ckpt.cli.facts import CheckFacts, CheckpointFacts, FieldFacts
from incremental_ckpt.comparison import TableDifference
from incremental_ckpt.pruning import PruneReport

_GAP = 2
_CHAIN_HEAD, _CHAIN_TAIL = 2, 8
# Wide enough for any table: one line per row, which a narrow terminal wraps and a pipe keeps whole.
_UNBOUNDED = 100_000


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to main: rich would exit by itself, with another code."""
        raise BrokenPipeError


def console(stream: TextIO) -> Console:
    """A console for a stream that is coloured only if it is a terminal, whatever FORCE_COLOR says."""
    return _Console(
        file=stream,
        force_terminal=stream.isatty(),
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
        width=_UNBOUNDED,
    )


def show_checkpoint(url: str, facts: CheckpointFacts) -> None:
    out, info = console(sys.stdout), facts.checkpoint
    out.print(f"checkpoint {info.seq} of {text.printable(url)}", style="bold")
    _pairs(
        out,
        [
            ("step", str(info.step)),
            ("kind", info.kind if info.parent is None else f"{info.kind} on {info.parent}"),
            ("created", f"{text.time(info.created)} UTC"),
            ("epoch", "-" if info.epoch is None else str(info.epoch)),
            ("loss", text.number(info.loss)),
            *((name, text.number(value)) for name, value in sorted(info.metrics.items())),
            ("rows", f"{info.rows:,} of {info.table_rows:,} ({text.share(info.rows, info.table_rows)})"),
            ("size", text.size(info.bytes) + _beside(facts.equivalent_bytes)),
            ("job", f"{info.job}, attempt {info.attempt}, {text.count(info.world_size, 'rank')}"),
            ("digest", facts.digest),
        ],
    )
    _heading(out, "chain", f"a resume reads these, {text.size(sum(link.bytes for link in facts.chain))} at most")
    chain = _table(["seq", "step", "kind", "rows", "size"], left={"kind"})
    left_out = len(facts.chain) - _CHAIN_HEAD - _CHAIN_TAIL
    for place, link in enumerate(facts.chain):
        if left_out > 1 and place == _CHAIN_HEAD:
            chain.add_row("...", "", Text(f"{left_out} more", "dim"))
        if left_out > 1 and _CHAIN_HEAD <= place < len(facts.chain) - _CHAIN_TAIL:
            continue
        kind = Text("equivalent base" if link.compacted else link.kind, STYLES.get(link.kind, ""))
        chain.add_row(str(link.seq), str(link.step), kind, f"{link.rows:,}", text.size(link.bytes))
    out.print(chain)
    _heading(out, "tables", text.count(len(facts.tables), "table"))
    tables = _table(
        ["table", "rows", "cols", "shards", "fields", "carried", "of all", "size"], left={"table", "fields"}
    )
    for table in facts.tables:
        tables.add_row(
            text.printable(table.name),
            f"{table.rows:,}",
            str(table.cols),
            f"{table.shards} alike" if table.replicated else str(table.shards),
            ", ".join(_field(field) for field in table.fields),
            f"{table.rows_carried:,}",
            text.share(table.rows_carried, table.rows),
            text.size(table.bytes),
        )
    if facts.tables:
        out.print(tables)
    _heading(out, "state", "beside the rows")
    state = _table(["name", "ranks", "tensors", "size"], left={"name"})
    for named in facts.state:
        state.add_row(text.printable(named.name), str(named.ranks), f"{named.tensors:,}", text.size(named.bytes))
    out.print(state)
    _heading(out, "environment", "a resume warns of what differs")
    _pairs(out, [(name, str(value)) for name, value in sorted(facts.environment.items())])


def _beside(equivalent_bytes: int | None) -> str:
    return "" if equivalent_bytes is None else f", and {text.size(equivalent_bytes)} of an equivalent base"


def show_check(url: str, facts: CheckFacts) -> None:
    out, report = console(sys.stdout), facts.report
    if not report.checkpoints:
        out.print(f"{text.printable(url)} holds no checkpoint yet: nothing to check")
        return
    looked = "with every checksum" if facts.deep else "sizes and digests; --deep also reads all rows"
    out.print(
        f"{text.printable(url)}: {text.count(report.checkpoints, 'checkpoint')}, "
        f"{text.count(report.objects, 'object')}, "
        f"{text.size(report.bytes_read)} read ({looked})"
    )
    if report.ok:
        out.print(f"all can be restored: {text.ranges(report.restorable)}", style="green")
        return
    _heading(out, "problems", "")
    for (key, what), seqs in _grouped(facts).items():
        out.print(Text(f"  seq {text.ranges(seqs)}  {text.printable(key)}", style="red"))
        out.print(Text(f"    {text.printable(what)}"))
    _heading(out, "what can be restored", "")
    out.print(f"  whole:   {text.ranges(report.restorable) or 'none'}")
    out.print(f"  damaged: {text.ranges(report.damaged) or 'none'}")
    _heading(out, "what to do", "")
    for line in _advice(facts):
        out.print(f"  {line}")


def show_prune(url: str, report: PruneReport) -> None:
    out, plan = console(sys.stdout), report.plan
    if not plan.kept:
        out.print(f"{text.printable(url)} holds no checkpoint yet: nothing to prune")
        return
    out.print(f"keeps    {text.ranges(plan.wanted) or 'none'}")
    if plan.needed:
        out.print(f"needs    {text.ranges(plan.needed)}: those are read from these (`ickpt compact` ends that)")
    if plan.in_use:
        out.print(
            f"in use   {text.ranges(plan.in_use)}: the newest, or what a job goes on from, and what that is read from"
        )
    mendable = [seq for seq in plan.kept if seq not in {*plan.wanted, *plan.needed, *plan.in_use}]
    if plan.damaged:
        stay = f"; {text.ranges(mendable)} stay, since they might be mended" if mendable else ""
        out.print(f"damaged  {text.ranges(plan.damaged)}: not counted (`ickpt check` tells more){stay}", style="red")
    forgets = "forgot " if report.executed else "forgets"
    out.print(f"{forgets}  {text.ranges(report.forgotten if report.executed else plan.forgotten) or 'none'}")
    orphans = f", {text.size(plan.orphan_bytes)} of it of dead attempts" if plan.orphan_bytes else ""
    if report.executed:
        out.print(f"freed    {text.size(report.bytes_freed)}{orphans}")
    else:
        out.print(f"frees    {text.size(plan.bytes)}{orphans}; nothing was deleted (--dry-run)")


def show_differences(found: Sequence[TableDifference]) -> None:
    out = console(sys.stdout)
    fields = list(dict.fromkeys(name for each in found for name in each.fields))
    columns = ["table", "rows", "changed", "of all", *(text.printable(name) for name in fields)]
    compared = all(each.what in ("same", "changed") for each in found)
    table = _table(columns if compared else [*columns, "what"], left={"table", "what"})
    for each in found:
        counts = [f"{each.fields[name]:,}" if name in each.fields else "-" for name in fields]
        shown = "" if each.what in ("same", "changed") else each.what
        cells = [text.printable(each.table), f"{each.rows:,}", f"{each.changed:,}", text.share(each.changed, each.rows)]
        table.add_row(*(Text(cell) for cell in (*cells, *counts, *([] if compared else [shown]))))
    out.print(table)


def _grouped(facts: CheckFacts) -> dict[tuple[str, str], list[int]]:
    """Checkpoints by problem: a damaged base is met by every delta on it."""
    grouped: dict[tuple[str, str], list[int]] = {}
    for problem in facts.report.problems:
        grouped.setdefault((problem.key, problem.what), []).append(problem.seq)
    return {problem: sorted(set(seqs)) for problem, seqs in grouped.items()}


def _advice(facts: CheckFacts) -> Iterator[str]:
    yield "If there is a copy of the store, put the objects named above back from it and check again."
    if facts.resumes is None and facts.report.restorable:
        yield (
            "Without one, a resume fails: none of the newest checkpoint's ancestors is whole. "
            "resume_from_checkpoint(step=...) takes one that is."
        )
    elif facts.resumes is None:
        yield "Without one, nothing can be resumed from this store: start a new run in another place."
    elif facts.passed_over:
        yield (
            f"Without one, a resume passes over {text.ranges(facts.passed_over)} by itself and goes on from seq "
            f"{facts.resumes.seq} (step {facts.resumes.step})."
        )
    elif not facts.report.damaged:
        yield "Without one, nothing is lost: a resume replays the chain that the damaged compaction stands for."
    else:
        yield (
            f"The newest checkpoint, seq {facts.resumes.seq} (step {facts.resumes.step}), is whole: a resume takes it. "
            f"Only {text.ranges(facts.report.damaged)} cannot be gone back to."
        )
    if not facts.deep:
        yield "--deep also tells whether all rows of what looks whole can be read."


def _table(columns: Sequence[str], left: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(Text(name), justify="left" if name in left else "right", no_wrap=True)
    return table


def _heading(out: Console, title: str, remark: str) -> None:
    out.print()
    out.print(Text.assemble((title, "bold"), (f"  ({remark})" if remark else "", "dim")))


def _pairs(out: Console, pairs: Sequence[tuple[str, str]]) -> None:
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        out.print(Text.assemble((f"  {text.printable(name):<{width}}  ", "dim"), text.printable(value)))


def _field(field: FieldFacts) -> str:
    codecs = [codec for codec in field.codecs if codec != "raw"]
    stored = f" as {'+'.join(field.codecs)}" if codecs else ""
    return f"{text.printable(field.name)} {field.dtype}[{field.width}]{stored}"
