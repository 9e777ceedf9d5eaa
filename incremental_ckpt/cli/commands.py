"""The verbs, their arguments and their help.

It must not know how facts are read from a repository (facts.py) or drawn (tables.py); both load only when a verb runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from incremental_ckpt.cli import CODES, USAGE, code_of, print_error, upkeep
from incremental_ckpt.errors import CorruptionError

Verb = Callable[[], int]
"""A parsed command: run after typer is done, so that its errors are ours to report."""

app = typer.Typer(
    name="ickpt",
    help="Look into a store of checkpoints and look after it. Needs no model; export and import need torch.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 unexpected, 2 usage, 3 not found, 4 conflict, 5 damaged, 6 foreign or newer format, "
    "7 mismatch, 8 save failed, 9 storage, 130 interrupted.",
)

Url = Annotated[str, typer.Argument(metavar="URL", help="The store: a local path or a URL, as given to Checkpointer.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: a contract, see docs/operations.md.")]


def run(args: Sequence[str]) -> int:
    """Parse and run one command.

    Raises:
        CheckpointError: what the verb met.
    """
    # Warnings of the library would come between: what matters of them is in the reports.
    log = logging.getLogger("incremental_ckpt")
    if not log.hasHandlers():
        log.addHandler(logging.NullHandler())
    command = typer.main.get_command(app)
    try:
        verb = command.main(args=list(args) or ["--help"], prog_name="ickpt", standalone_mode=False)
    except upkeep.UsageError as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "ickpt"
        message = error.format_message().rstrip(".")
        print_error(f"{message}{'' if message.endswith('?') else '.'} `{path} --help` explains")
        return USAGE
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit:
        raise BrokenPipeError from None  # how typer leaves when nobody reads the help any more
    if not args:
        return USAGE
    if isinstance(verb, int):
        return verb
    return int(verb()) if callable(verb) else 0


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("incremental-ckpt")
        except PackageNotFoundError:
            found = "(a source tree that is not installed)"
        typer.echo(f"ickpt {found}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of ickpt itself."""


@app.command("ls", short_help="List the checkpoints.")
def list_checkpoints(url: Url, as_json: Json = False) -> Verb:
    """List the checkpoints of a store, oldest first."""

    def verb() -> int:
        from incremental_ckpt.cli import facts

        found = facts.catalogue(facts.open_repository(url))
        if as_json:
            typer.echo(facts.to_json(facts.catalogue_json(found)))
        else:
            from incremental_ckpt.cli.catalogue import show_catalogue

            show_catalogue(url, found)
        if found.unreadable:
            seq, error = found.unreadable[0]
            others = len(found.unreadable) - 1
            more = f" (and {others} more; `ickpt check` names them all)" if others else ""
            print_error(f"seq {seq} cannot be read{more}: {error}")
            return code_of(error)
        return 0

    return verb


@app.command("show", short_help="Show one checkpoint in full.")
def show(
    url: Url,
    seq: Annotated[
        int | None, typer.Option("--seq", min=1, metavar="N", help="Its number; default: the newest.")
    ] = None,
    as_json: Json = False,
) -> Verb:
    """Show one checkpoint: its facts, chain, tables, state and environment."""

    def verb() -> int:
        from incremental_ckpt.cli import facts

        found = facts.checkpoint_facts(facts.open_repository(url), seq)
        if as_json:
            typer.echo(facts.to_json(facts.facts_json(found)))
        else:
            from incremental_ckpt.cli import tables

            tables.show_checkpoint(url, found)
        return 0

    return verb


@app.command("check", short_help="Prove what can be restored.")
def check(
    url: Url,
    deep: Annotated[bool, typer.Option("--deep", help="Also read every row and verify every checksum.")] = False,
    as_json: Json = False,
) -> Verb:
    """Prove that every checkpoint can be restored, or say which can, and what to do."""

    def verb() -> int:
        from incremental_ckpt.cli import facts
        from incremental_ckpt.cli.progress import checking
        from incremental_ckpt.repository.check import check_repository

        repository = facts.open_repository(url)
        with checking() as progress:
            report = check_repository(repository, deep=deep, progress=progress)
        found = facts.check_facts(repository, report, deep=deep)
        if as_json:
            typer.echo(facts.to_json(facts.check_json(found)))
        else:
            from incremental_ckpt.cli import tables

            tables.show_check(url, found)
        if report.ok:
            return 0
        key, what = report.problems[0].key, report.problems[0].what
        print_error(
            f"{len(report.damaged)} of {report.checkpoints} checkpoints in {url} cannot be restored; "
            f"the first problem: {what if key in what else f'{key}: {what}'}"
        )
        return CODES[CorruptionError]

    return verb


for _name, _help, _verb in upkeep.VERBS:
    app.command(_name, short_help=_help)(_verb)
