"""The verbs that write: compact, prune, export, import; and diff, which reads a lot.

It must not know how they do it; what they stand on loads only when a verb runs, and torch only with export and import.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from incremental_ckpt.cli import CODES, print_error
from incremental_ckpt.errors import NotFoundError, StorageError

if TYPE_CHECKING:
    from incremental_ckpt.policy import Keep
    from incremental_ckpt.repository import Repository

Verb = Callable[[], int]

UsageError: Any = typer.BadParameter.__base__
"""Says what is wrong without typer's own words before it."""

Url = Annotated[str, typer.Argument(metavar="URL", help="The store: a local path or a URL, as given to Checkpointer.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: a contract, see docs/operations.md.")]
Seq = Annotated[int | None, typer.Option("--seq", min=1, metavar="N", help="Its number; default: the newest.")]

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]i?)?B?")
_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"Ki": 2**10, "ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def compact(
    url: Url,
    seq: Seq = None,
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE", help="For buffers, as 512MiB or 2GB.")] = "512MiB",
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="Be process I (from 0) of N that share the work.")
    ] = "0/1",
    as_json: Json = False,
) -> Verb:
    """Write an equivalent base for a checkpoint, so that a resume replays no chain. Nothing is rounded again."""
    limit, part = _size(memory), _part(shard)

    def verb() -> int:
        from incremental_ckpt.cli.progress import moving
        from incremental_ckpt.compaction import compact

        with moving("compacting") as progress:
            report = compact(_repository(url), seq, memory=limit, shard=part, progress=progress)
        if as_json:
            return _print_json(report)
        typer.echo(_compacted(url, dataclasses.asdict(report)))
        return 0

    return verb


def prune(
    url: Url,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=1, metavar="K", help="Keep the K newest checkpoints.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", min=1, metavar="STEPS", help="Keep the first of every so many steps.")
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option("--keep-best", metavar="METRIC:K[:min]", help="Keep the K best by a metric, or by loss:K:min."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    as_json: Json = False,
) -> Verb:
    """Forget the checkpoints that no option keeps, and delete their data and that of dead attempts."""
    policies = _policies(keep_last, keep_every, keep_best or [])

    def verb() -> int:
        from incremental_ckpt.cli import tables
        from incremental_ckpt.pruning import prune

        report = prune(_repository(url, read_only=dry_run), policies, dry_run=dry_run)
        if as_json:
            plan = dataclasses.asdict(report.plan)
            plan["removals"] = [{**r, "keys": len(r["keys"])} for r in plan["removals"]]
            facts = dataclasses.asdict(report) | plan
            del facts["plan"]
            _print_json(facts | {"bytes": report.plan.bytes, "orphan_bytes": report.plan.orphan_bytes})
        else:
            tables.show_prune(url, report)
        if report.failures:
            more = f" (and {len(report.failures) - 1} more)" if len(report.failures) > 1 else ""
            print_error(f"not all could be deleted{more}, the next prune tries again: {report.failures[0]}")
            return CODES[StorageError]
        return 0

    return verb


def export(
    url: Url,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A file (torch) or folder that does not exist yet.")],
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="torch, safetensors or dcp.")] = "torch",
    seq: Seq = None,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Also the state of the optimizers.")] = False,
    as_json: Json = False,
) -> Verb:
    """Write the model for others: torch.save's file, safetensors, or a torch.distributed.checkpoint directory."""
    if form not in ("torch", "safetensors", "dcp"):
        raise UsageError(f"--format must be torch, safetensors or dcp, not {form!r}")

    def verb() -> int:
        repository = _repository(url, read_only=True)
        report = _torch_verb("exporting", "export")(repository, out, form, seq, optimizer=optimizer)
        if as_json:
            return _print_json(report)
        from incremental_ckpt.cli import text

        typer.echo(
            f"seq {report.seq} (step {report.step}) is in {text.printable(str(out))}: {report.format}, "
            f"{text.count(report.tables, 'table')}, {text.count(report.tensors, 'other tensor')}, "
            f"{'with' if report.optimizer else 'without'} optimizers, {text.size(report.bytes)}"
        )
        return 0

    return verb


def import_(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A torch file, safetensors, or a DCP directory.")],
    url: Url,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="NAME", help="What is a table: its tensor's name without .weight; * and ?."),
    ] = None,
    no_tables: Annotated[bool, typer.Option("--no-tables", help="The model has no tables.")] = False,
    step: Annotated[int, typer.Option("--step", min=0, metavar="N", help="The training step it was saved at.")] = 0,
    as_json: Json = False,
) -> Verb:
    """Make a saved model the first checkpoint of an empty store."""

    def verb() -> int:
        from incremental_ckpt.cli import facts, text

        import_checkpoint = _torch_verb("importing", "import_checkpoint")
        chosen = [] if no_tables else table
        report = import_checkpoint(source, _repository(url, may_be_new=True), tables=chosen, step=step)
        info = report.checkpoint
        if as_json:
            told = {"tables": report.tables, "tensors": report.tensors, "optimizer": report.optimizer}
            return _print_json({"checkpoint": facts.checkpoint_json(info), **told})
        typer.echo(
            f"seq {info.seq} (step {info.step}) of {text.printable(url)}: {text.size(info.bytes)}, "
            f"{text.count(len(report.tables), 'table')}, {text.count(report.tensors, 'other tensor')}"
        )
        for name in report.tables:
            typer.echo(f"  table {text.printable(name)}")
        if not report.optimizer:
            typer.echo("without optimizers: resume it with strict=False, then the next save is complete")
        return 0

    return verb


def diff(
    url: Url,
    first: Annotated[int, typer.Argument(min=1, metavar="A", help="Number of a checkpoint.")],
    second: Annotated[int, typer.Argument(min=1, metavar="B", help="Number of another one.")],
    as_json: Json = False,
) -> Verb:
    """Count the rows that differ between two checkpoints, table by table."""

    def verb() -> int:
        from incremental_ckpt.cli import tables
        from incremental_ckpt.comparison import compare

        found = compare(_repository(url, read_only=True), first, second)
        if as_json:
            return _print_json([dataclasses.asdict(each) for each in found])
        tables.show_differences(found)
        return 0

    return verb


VERBS: Sequence[tuple[str, str, Callable[..., Verb]]] = (
    ("compact", "Turn a chain into an equivalent base.", compact),
    ("prune", "Forget old checkpoints and free their space.", prune),
    ("export", "Write the model for others.", export),
    ("import", "Begin a store with a saved model.", import_),
    ("diff", "Count rows that differ between two checkpoints.", diff),
)
"""Name, short help and function of each verb."""


def _repository(url: str, *, read_only: bool = False, may_be_new: bool = False) -> Repository:
    from incremental_ckpt.repository import Repository
    from incremental_ckpt.storage import LocalStore, open_store

    store = open_store(url, read_only=read_only)
    if isinstance(store, LocalStore) and not may_be_new and not Path(store.url).exists():
        raise NotFoundError(f"{url} does not exist: check the path (a run that has saved nothing yet has no folder)")
    return Repository(store)


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
    from incremental_ckpt.cli import facts

    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    typer.echo(facts.to_json(plain))
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
        raise UsageError(f"--memory must be a size such as 512MiB or 2GB, not {size!r}")
    unit = match[2] or ""
    found = int(float(match[1]) * (_BINARY_UNITS.get(unit) or _UNITS[unit]))
    if found < 64 * 2**20:
        raise UsageError(f"--memory must be 64MiB at least, not {size!r}")
    return found


def _part(shard: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", shard)
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"--shard must be I/N with I from 0 to N-1, such as 0/4, not {shard!r}")
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
            raise UsageError(f"--keep-best must be METRIC:K or METRIC:K:min, not {each!r}")
        found.append(KeepBest(int(match[2]), match[1], "min" if match[3] == "min" else "max"))
    if not found:
        raise UsageError("say what to keep: --keep-last K, --keep-every STEPS or --keep-best METRIC:K")
    return found
