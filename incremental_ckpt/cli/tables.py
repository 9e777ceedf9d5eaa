"""Facts drawn for people: aligned tables, colours on a terminal only.

It must not know repositories or stores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

from incremental_ckpt.cli import text
from incremental_ckpt.cli.catalogue_table import STYLES
from incremental_ckpt.cli.columns import Column, fitting, lines, painter, too_narrow, width_of, wrapped
from incremental_ckpt.cli.facts import ChainLink, CheckFacts, CheckpointFacts, FieldFacts
from incremental_ckpt.comparison import TableDifference
from incremental_ckpt.pruning import PruneReport
from incremental_ckpt.repository import CheckReport

_CHAIN_HEAD, _CHAIN_TAIL = 2, 8


class _Page:
    """What is written to stdout, as wide as that is."""

    def __init__(self) -> None:
        self.width = width_of(sys.stdout)
        self.paint = painter(sys.stdout)

    def line(self, line: str = "", style: str = "") -> None:
        sys.stdout.write((self.paint(line, style) if style else line) + "\n")

    def prose(self, line: str, style: str = "") -> None:
        for part in wrapped(line, self.width):
            self.line(part, style)

    def heading(self, title: str, remark: str = "") -> None:
        self.line()
        self.line(self.paint(title, "bold") + (self.paint(f"  ({remark})", "dim") if remark else ""))

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> None:
        width = max((text.width(text.printable(name)) for name, _ in pairs), default=0)
        for name, value in pairs:
            shown = text.printable(name)
            self.line(f"{self.paint(f'  {shown}', 'dim')}{' ' * (width - text.width(shown))}  {text.printable(value)}")

    def table(self, columns: Sequence[Column]) -> None:
        shown = fitting(columns, self.width)
        for line in (*lines(shown, self.paint), *too_narrow(columns, shown, self.paint)):
            self.line(line)


def show_checkpoint(url: str, facts: CheckpointFacts) -> None:
    out, info = _Page(), facts.checkpoint
    out.line(f"checkpoint {info.seq} of {text.printable(url)}", "bold")
    out.pairs(
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
        ]
    )
    if facts.problems:
        out.heading("problems", "`ickpt check` tells what can be restored")
        for problem in facts.problems:
            _problem(out, (problem.seq,), problem.key, problem.what)
    read = text.size(sum(link.bytes for link in facts.chain))
    out.heading(
        "chain", f"a resume reads these, {read} at most" if facts.chain_is_whole else "what can be read of it: no base"
    )
    out.table(_chain(facts.chain))
    out.heading("tables", text.count(len(facts.tables), "table"))
    if facts.tables:
        out.table(_tables(facts))
    out.heading("state", "beside the rows")
    out.table(
        [
            Column("name", [text.printable(named.name) for named in facts.state], left=True),
            Column("ranks", [str(named.ranks) for named in facts.state]),
            Column("tensors", [f"{named.tensors:,}" for named in facts.state]),
            Column("size", [text.size(named.bytes) for named in facts.state]),
        ]
    )
    out.heading("environment", "a resume warns of what differs")
    out.pairs([(name, str(value)) for name, value in sorted(facts.environment.items())])


def _chain(chain: Sequence[ChainLink]) -> list[Column]:
    left_out = len(chain) - _CHAIN_HEAD - _CHAIN_TAIL
    shown: list[ChainLink | None] = list(chain)
    if left_out > 1:
        shown[_CHAIN_HEAD : len(chain) - _CHAIN_TAIL] = [None]
    kinds = [
        f"{left_out} more" if link is None else "equivalent base" if link.compacted else link.kind for link in shown
    ]

    def style(kind: str) -> str | None:
        return "dim" if kind.endswith(" more") else STYLES.get(kind)

    return [
        Column("seq", ["..." if link is None else str(link.seq) for link in shown]),
        Column("step", ["..." if link is None else str(link.step) for link in shown]),
        Column("kind", kinds, left=True, styles=style),
        Column("rows", ["" if link is None else f"{link.rows:,}" for link in shown]),
        Column("size", ["" if link is None else text.size(link.bytes) for link in shown]),
    ]


def _tables(facts: CheckpointFacts) -> list[Column]:
    tables = facts.tables
    return [
        Column("table", [text.printable(table.name) for table in tables], left=True),
        Column("rows", [f"{table.rows:,}" for table in tables], 4),
        Column("cols", [str(table.cols) for table in tables], 2),
        Column("shards", [f"{t.shards} alike" if t.replicated else str(t.shards) for t in tables], 3),
        Column("fields", [", ".join(_fields(table.fields)) for table in tables], 6, left=True),
        Column("carried", [f"{table.rows_carried:,}" for table in tables], 5),
        Column("of all", [text.share(table.rows_carried, table.rows) for table in tables], 1),
        Column("size", [text.size(table.bytes) for table in tables]),
    ]


def _fields(fields: Sequence[FieldFacts]) -> Iterator[str]:
    """Those that follow each other and are alike in one."""
    for sort, alike in groupby(fields, key=_sort):
        yield f"{', '.join(text.printable(field.name) for field in alike)} {sort}"


def _sort(field: FieldFacts) -> str:
    codecs = [codec for codec in field.codecs if codec != "raw"]
    return f"{field.dtype}[{field.width}]" + (f" as {'+'.join(field.codecs)}" if codecs else "")


def _beside(equivalent_bytes: int | None) -> str:
    return "" if equivalent_bytes is None else f", and {text.size(equivalent_bytes)} of an equivalent base"


def show_check(url: str, facts: CheckFacts) -> None:
    out, report = _Page(), facts.report
    if not report.checkpoints and report.ok:
        out.prose(f"{text.printable(url)} holds no checkpoint yet: nothing to check")
        return
    looked = "with every checksum" if facts.deep else "sizes and digests; --deep also reads all rows"
    out.prose(
        f"{text.printable(url)}: {text.count(report.checkpoints, 'checkpoint')}, "
        f"{text.count(report.objects, 'object')}, "
        f"{text.size(report.bytes_read)} read ({looked})"
    )
    if report.ok:
        out.line(f"all can be restored: {text.ranges(report.restorable)}", "green")
        return
    out.heading("problems")
    for (key, what), seqs in _grouped(facts).items():
        _problem(out, seqs, key, what)
    out.heading("what can be restored")
    out.line(f"  whole:   {text.ranges(report.restorable) or 'none'}")
    out.line(f"  damaged: {text.ranges(report.damaged) or 'none'}")
    if report.lost:
        out.line(f"  lost:    {text.ranges(report.lost)}")
    out.heading("what to do")
    for line in _advice(facts):
        out.prose(f"  {line}")


def _problem(out: _Page, seqs: Sequence[int], key: str, what: str) -> None:
    out.line(f"  seq {text.ranges(seqs)}  {text.printable(key)}", "red")
    out.prose(f"    {text.printable(what)}")


def verdict(url: str, report: CheckReport) -> str:
    """A check that found something wrong, in one line."""
    key, what = report.problems[0].key, report.problems[0].what
    first = f"the first problem: {what if key in what else f'{key}: {what}'}"
    lost = len(report.lost)
    if report.damaged:
        failed = f"{len(report.damaged)} of {report.checkpoints} checkpoints in {url} cannot be restored"
        return f"{failed}{f', and {lost:,} more {_is(lost)} lost' if lost else ''}; {first}"
    if lost:
        return f"{text.count(lost, 'checkpoint')} of {url} {_is(lost)} lost; {first}"
    return f"all {text.count(report.checkpoints, 'checkpoint')} in {url} can be restored, but not all is whole; {first}"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def show_prune(url: str, report: PruneReport) -> None:
    out, plan = _Page(), report.plan
    if not plan.kept:
        out.prose(f"{text.printable(url)} holds no checkpoint yet: nothing to prune")
        return
    out.prose(f"keeps    {text.ranges(plan.wanted) or 'none'}")
    if plan.needed:
        out.prose(
            f"needs    {text.ranges(plan.needed)}: deltas among those above are read from these (`ickpt compact` of "
            "the deltas ends that)"
        )
    if plan.in_use:
        out.prose(
            f"in use   {text.ranges(plan.in_use)}: the newest, or what a job goes on from, and what that is read from"
        )
    mendable = [seq for seq in plan.kept if seq not in {*plan.wanted, *plan.needed, *plan.in_use}]
    if plan.newer:
        out.prose(
            f"newer    {text.ranges(plan.newer)}: compacted by a newer version, left with all that it may need "
            "(upgrade incremental_ckpt)",
            "red",
        )
    if plan.damaged:
        stay = f"; {text.ranges(mendable)} stay, since they might be mended" if mendable else ""
        out.prose(f"damaged  {text.ranges(plan.damaged)}: not counted (`ickpt check` tells more){stay}", "red")
    forgets = "forgot " if report.executed else "forgets"
    out.prose(f"{forgets}  {text.ranges(report.forgotten if report.executed else plan.forgotten) or 'none'}")
    orphans = f", {text.size(plan.orphan_bytes)} of it of dead attempts" if plan.orphan_bytes else ""
    if report.executed:
        out.prose(f"freed    {text.size(report.bytes_freed)}{orphans}")
    else:
        out.prose(f"frees    {text.size(plan.bytes)}{orphans}; nothing was deleted (--dry-run)")


def show_differences(found: Sequence[TableDifference]) -> None:
    fields = list(dict.fromkeys(name for each in found for name in each.fields))
    columns = [
        Column("table", [text.printable(each.table) for each in found], left=True),
        Column("rows", [f"{each.rows:,}" for each in found], 2),
        Column("changed", [f"{each.changed:,}" for each in found]),
        Column("of all", [text.share(each.changed, each.rows) for each in found], 3),
    ]
    for name in fields:
        counts = [f"{each.fields[name]:,}" if name in each.fields else "-" for each in found]
        columns.append(Column(text.printable(name), counts, 1))
    if any(each.what not in ("same", "changed") for each in found):
        shown = ["" if each.what in ("same", "changed") else each.what for each in found]
        columns.append(Column("what", shown, left=True))
    _Page().table(columns)


def _grouped(facts: CheckFacts) -> dict[tuple[str, str], list[int]]:
    """Checkpoints by problem: a damaged base is met by every delta on it."""
    grouped: dict[tuple[str, str], list[int]] = {}
    for problem in facts.report.problems:
        grouped.setdefault((problem.key, problem.what), []).append(problem.seq)
    return {problem: sorted(set(seqs)) for problem, seqs in grouped.items()}


def _advice(facts: CheckFacts) -> Iterator[str]:
    newer = any(problem.newer for problem in facts.report.problems)
    damage = not all(problem.newer for problem in facts.report.problems)
    if damage:
        others = "damaged objects" if newer else "objects named above"
        yield f"If there is a copy of the store, put the {others} back from it and check again."
    if newer:
        yield "What a newer version has written is whole for all that this one can tell: upgrade incremental_ckpt."
    otherwise = "Without either" if newer and damage else "Without one" if damage else "Until then"
    if facts.resumes is None and facts.report.restorable:
        why = (
            "it asks for the upgrade, and takes no older checkpoint by itself"
            if facts.asks_for_upgrade
            else "none of the newest checkpoint's ancestors is whole"
        )
        yield f"{otherwise}, a resume fails: {why}. resume_from_checkpoint(step=...) takes one that is whole."
    elif facts.resumes is None and not damage:
        yield f"{otherwise}, nothing can be resumed from this store."
    elif facts.resumes is None:
        yield f"{otherwise}, nothing can be resumed from this store: start a new run in another place."
    elif facts.passed_over:
        yield (
            f"{otherwise}, a resume passes over {text.ranges(facts.passed_over)} by itself and goes on from seq "
            f"{facts.resumes.seq} (step {facts.resumes.step})."
        )
    elif facts.report.lost and not facts.report.damaged:
        yield f"{otherwise}, {text.ranges(facts.report.lost)} cannot be gone back to; nothing that is there needs it."
    elif not facts.report.damaged:
        what = "damaged" if damage else "newer"
        yield f"{otherwise}, nothing is lost: a resume replays the chain that the {what} compaction stands for."
    else:
        yield (
            f"The newest checkpoint, seq {facts.resumes.seq} (step {facts.resumes.step}), is whole: a resume takes it. "
            f"Only {text.ranges(facts.report.damaged)} cannot be gone back to."
        )
    if not facts.deep:
        yield "--deep also tells whether all rows of what looks whole can be read."
