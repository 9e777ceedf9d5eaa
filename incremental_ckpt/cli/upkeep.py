"""The verbs that write: compact, prune, export, import; and diff, which reads a lot.

It must not know how they do it; what they stand on loads only when a verb runs, and torch only with export and import.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from incremental_ckpt.cli import CODES, arguments, print_error
from incremental_ckpt.cli.arguments import Verb, number_option, path_argument, verb
from incremental_ckpt.errors import NotFoundError, StorageError

if TYPE_CHECKING:
    from incremental_ckpt.policy import Keep

_FORMATS = ("torch", "safetensors", "dcp")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]i?)?B?")
_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"Ki": 2**10, "ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@verb(
    "compact",
    "Turn a chain into an equivalent base.",
    "ickpt compact runs/17",
    "ickpt compact runs/17 --seq 4 --memory 2GB",
    "ickpt compact s3://bucket/runs/17 --shard 0/4    # and 1/4, 2/4, 3/4 elsewhere",
)
@arguments.url
@arguments.seq
@click.option("--memory", metavar="SIZE", default="512MiB", help="For buffers, as 512MiB or 2GB.", show_default=True)
@click.option("--shard", metavar="I/N", default="0/1", help="Be process I (from 0) of N that share the work.")
@arguments.as_json
def compact(url: str, seq: int | None, memory: str, shard: str, as_json: bool) -> Verb:
    """Write an equivalent base for a checkpoint of the store URL, so that a resume replays no chain. Nothing is rounded
    again."""
    limit, part = _size(memory), _part(shard)

    def compacted() -> int:
        from incremental_ckpt.cli.places import open_repository
        from incremental_ckpt.cli.progress import moving
        from incremental_ckpt.compaction import compact

        with moving("compacting") as progress:
            report = compact(open_repository(url, read_only=False), seq, memory=limit, shard=part, progress=progress)
        if as_json:
            return _print_json(report)
        click.echo(_compacted(url, dataclasses.asdict(report)))
        return 0

    return compacted


@verb(
    "prune",
    "Forget old checkpoints and free their space.",
    "ickpt prune runs/17 --keep-last 3 --dry-run",
    "ickpt prune runs/17 --keep-last 3 --keep-best auc:1 --keep-every 100000",
)
@arguments.url
@number_option("--keep-last", "K", "Keep the K newest checkpoints.")
@number_option("--keep-every", "STEPS", "Keep the first of every so many steps.")
@click.option("--keep-best", metavar="METRIC:K[:min]", multiple=True, help="Keep the K best by a metric, or by loss:K.")
@click.option("--dry-run", is_flag=True, help="Only show what would go.")
@arguments.as_json
def prune(
    url: str, keep_last: int | None, keep_every: int | None, keep_best: Sequence[str], dry_run: bool, as_json: bool
) -> Verb:
    """Forget the checkpoints of the store URL that no option keeps, and delete their data and that of dead attempts."""
    policies = _policies(keep_last, keep_every, keep_best)

    def pruned() -> int:
        from incremental_ckpt.cli import tables, text
        from incremental_ckpt.cli.places import open_repository
        from incremental_ckpt.cli.progress import moving
        from incremental_ckpt.pruning import prune
        from incremental_ckpt.retention import unranked_metrics

        repository = open_repository(url, read_only=dry_run)
        with moving("pruning") as progress:
            report = prune(repository, policies, dry_run=dry_run, progress=progress)
        if as_json:
            plan = dataclasses.asdict(report.plan)
            plan["removals"] = [{**r, "keys": len(r["keys"])} for r in plan["removals"]]
            facts = dataclasses.asdict(report) | plan
            del facts["plan"]
            _print_json(facts | {"bytes": report.plan.bytes, "orphan_bytes": report.plan.orphan_bytes})
        else:
            tables.show_prune(url, report)
            for line in unranked_metrics(repository, policies, report.plan.kept).values():
                click.echo(f"note     {text.printable(line)}")
        if report.failures:
            more = f" (and {len(report.failures) - 1} more)" if len(report.failures) > 1 else ""
            print_error(f"not all could be deleted{more}, the next prune tries again: {report.failures[0]}")
            return CODES[StorageError]
        return 0

    return pruned


@verb(
    "export",
    "Write the model for others.",
    "ickpt export runs/17 model.pt",
    "ickpt export runs/17 model --format safetensors --seq 4",
)
@arguments.url
@path_argument("out", "OUT")
@click.option(
    "--format", "form", type=click.Choice(_FORMATS), default="torch", show_default=True, help="What is written to OUT."
)
@arguments.seq
@click.option("--optimizer", is_flag=True, help="Also the state of the optimizers.")
@arguments.as_json
def export(url: str, out: Path, form: str, seq: int | None, optimizer: bool, as_json: bool) -> Verb:
    """Write the model in the store URL to OUT for others: a file of torch.save, or a folder of safetensors or of
    torch.distributed.checkpoint. OUT must not exist yet."""

    _check_out(out)

    def exported() -> int:
        from incremental_ckpt.cli.places import open_repository
        from incremental_ckpt.cli.progress import moving

        repository, export = open_repository(url), _torch_verb("exporting", "export")
        with moving("exporting") as progress:
            report = export(repository, out, form, seq, optimizer=optimizer, progress=progress)
        if as_json:
            return _print_json(report)
        from incremental_ckpt.cli import text

        click.echo(
            f"seq {report.seq} (step {report.step}) is in {text.printable(str(out))}: {report.format}, "
            f"{text.count(report.tables, 'table')}, {text.count(report.tensors, 'other tensor')}, "
            f"{'with' if report.optimizer else 'without'} optimizers, {text.size(report.bytes)}"
        )
        return 0

    return exported


@verb(
    "import",
    "Begin a store with a saved model.",
    "ickpt import model.pt runs/18 --table 'towers.*.users'",
    "ickpt import exported runs/18 --step 5000",
)
@path_argument("source", "IN")
@arguments.url
@click.option(
    "--table", metavar="NAME", multiple=True, help="What is a table: its tensor's name without .weight; * and ?."
)
@click.option("--no-tables", is_flag=True, help="The model has no tables.")
@click.option(
    "--step",
    type=arguments.Number(min=0),
    metavar="N",
    default=0,
    show_default=True,
    help="Training step of the model.",
)
@arguments.as_json
def import_(source: Path, url: str, table: Sequence[str], no_tables: bool, step: int, as_json: bool) -> Verb:
    """Make the saved model IN (a torch file, safetensors, or a DCP directory) the first checkpoint of the empty store
    URL."""
    if table and no_tables:
        raise click.UsageError("--table and --no-tables exclude each other")

    def imported() -> int:
        from incremental_ckpt.cli import text
        from incremental_ckpt.cli.catalogue import checkpoint_json
        from incremental_ckpt.cli.places import open_repository
        from incremental_ckpt.cli.progress import moving

        chosen = [] if no_tables else list(table) or None
        repository = open_repository(url, read_only=False, may_be_new=True)
        take_in = _torch_verb("importing", "import_checkpoint")
        with moving("importing") as progress:
            report = take_in(source, repository, tables=chosen, step=step, progress=progress)
        info = report.checkpoint
        if as_json:
            told = {"tables": report.tables, "tensors": report.tensors, "optimizer": report.optimizer}
            return _print_json({"checkpoint": checkpoint_json(info, None), **told})
        click.echo(
            f"seq {info.seq} (step {info.step}) of {text.printable(url)}: {text.size(info.bytes)}, "
            f"{text.count(len(report.tables), 'table')}, {text.count(report.tensors, 'other tensor')}"
        )
        for name in report.tables:
            click.echo(f"  table {text.printable(name)}")
        if not report.optimizer:
            click.echo("without optimizers: resume it with strict=False, then the next save is complete")
        return 0

    return imported


@verb("diff", "Count rows that differ between two checkpoints.", "ickpt diff runs/17 4 5")
@arguments.url
@click.argument("first", type=arguments.Number(min=1), metavar="A")
@click.argument("second", type=arguments.Number(min=1), metavar="B")
@arguments.as_json
def diff(url: str, first: int, second: int, as_json: bool) -> Verb:
    """Count the rows that differ between the checkpoints numbered A and B of the store URL, table by table."""

    def compared() -> int:
        from incremental_ckpt.cli import tables
        from incremental_ckpt.cli.places import open_repository
        from incremental_ckpt.comparison import compare

        found = compare(open_repository(url), first, second)
        if as_json:
            return _print_json([dataclasses.asdict(each) for each in found])
        tables.show_differences(found)
        return 0

    return compared


COMMANDS: Sequence[click.Command] = (compact, prune, export, import_, diff)


def _check_out(out: Path) -> None:
    """Refuse before a store is opened.

    Raises:
        UsageError: something has this name.
        StorageError: nothing can be written there.
    """
    try:
        taken = "symbolic link" if out.is_symlink() else "folder" if out.is_dir() else "file" if out.exists() else ""
        above = next(place for place in out.absolute().parents if place.exists())
        writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    except OSError as error:
        raise StorageError(
            f"cannot write {out}: {error.strerror}. Nothing was touched: choose another place"
        ) from error
    if taken:
        raise click.UsageError(
            f"OUT must not exist, and {str(out)!r} is a {taken}: nothing was touched. Give another name, or remove it"
        )
    if not writable:
        why = "not writable by this user" if above.is_dir() else "a file, not a folder"
        raise StorageError(f"cannot write {out}: {above} is {why}. Nothing was touched: choose another place")


def _torch_verb(module: str, name: str) -> Callable[..., Any]:
    """By name, so that nothing else of the command line depends on torch."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(f"incremental_ckpt.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise NotFoundError(f"{name} needs torch, which is not installed: pip install torch") from error
    return found


def _print_json(value: object) -> int:
    from incremental_ckpt.cli.documents import to_json

    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    click.echo(to_json(plain))
    return 0


def _compacted(url: str, report: dict[str, Any]) -> str:
    from incremental_ckpt.cli import text

    what = f"seq {report['seq']} of {text.printable(url)}"
    if report["chain"] == 1:
        return f"{what}: a resume reads a base already, nothing to do"
    wrote = f"{text.size(report['bytes_read'])} read, {text.size(report['bytes_written'])} written"
    if report["missing"]:
        return f"{what}: this part is done ({wrote}); not there yet: parts {text.ranges(report['missing'])}"
    return f"{what}: a chain of {report['chain']} has an equivalent base now ({wrote})"


def _size(size: str) -> int:
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise click.UsageError(f"--memory must be a size such as 512MiB or 2GB, not {size!r}")
    unit = match[2] or ""
    found = int(float(match[1]) * (_BINARY_UNITS.get(unit) or _UNITS[unit]))
    if found < 64 * 2**20:
        raise click.UsageError(f"--memory must be 64MiB at least, not {size!r}")
    return found


def _part(shard: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", shard)
    if match is None or int(match[1]) >= int(match[2]):
        raise click.UsageError(f"--shard must be I/N with I from 0 to N-1, such as 0/4, not {shard!r}")
    return int(match[1]), int(match[2])


def _policies(last: int | None, every: int | None, best: Sequence[str]) -> list[Keep]:
    from incremental_ckpt.policy import KeepBest, KeepEvery, KeepLast

    found: list[Keep] = []
    if last is not None:
        found.append(KeepLast(last))
    if every is not None:
        found.append(KeepEvery(every))
    for each in best:
        match = re.fullmatch(r"(.+?):([1-9][0-9]{0,8})(?::(min|max))?", each)
        if match is None:
            raise click.UsageError(f"--keep-best must be METRIC:K or METRIC:K:min, not {each!r}")
        mode = cast("Literal['min', 'max'] | None", match[3])
        found.append(KeepBest(int(match[2]), match[1], mode))
    if not found:
        raise click.UsageError("say what to keep: --keep-last K, --keep-every STEPS or --keep-best METRIC:K")
    return found
