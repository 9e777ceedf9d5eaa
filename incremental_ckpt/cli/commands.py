"""The verbs that read, their arguments and their help; and how any verb is parsed and run.

It must not know how facts are read from a repository (catalogue.py, facts.py) or drawn (catalogue_table.py, tables.py):
these load only when a verb runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from incremental_ckpt.cli import CODES, USAGE, arguments, code_of, print_error, upkeep
from incremental_ckpt.cli.arguments import Verb, verb
from incremental_ckpt.errors import CorruptionError, FormatError

_COMPLETE = "_ICKPT_COMPLETE"
"""Set by the functions that `_ICKPT_COMPLETE=bash_source ickpt` gives to a shell."""


def run(args: Sequence[str]) -> int:
    """Parse and run one command.

    Raises:
        CheckpointError: what the verb met.
    """
    if _COMPLETE in os.environ:
        from click.shell_completion import shell_complete

        return shell_complete(app, {}, "ickpt", _COMPLETE, os.environ[_COMPLETE])
    try:
        parsed = app.main(args=list(args) or ["--help"], prog_name="ickpt", standalone_mode=False)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "ickpt"
        message = error.format_message().rstrip(".")
        print_error(f"{message}{'' if message.endswith('?') else '.'} `{path} --help` explains")
        return USAGE
    except click.Abort:
        raise KeyboardInterrupt from None
    except SystemExit:
        raise BrokenPipeError from None  # how click leaves when nobody reads the help any more
    if not args:
        return USAGE
    return int(parsed()) if callable(parsed) else 0


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("incremental-ckpt")
        except PackageNotFoundError:
            found = "(a source tree that is not installed)"
        click.echo(f"ickpt {found}")
        ctx.exit()


class _Ickpt(click.Group):
    """Lists the verbs in the order of the documentation."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_Ickpt,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="URL is what Checkpointer was given: a local path such as runs/17, or s3://bucket/runs/17. `ickpt COMMAND "
    "--help` shows options and examples.\n\nExit codes: 0 done, 1 unexpected, 2 usage, 3 not found, 4 conflict, "
    "5 damaged, 6 foreign or newer format, 7 mismatch, 8 save failed, 9 storage, 130 interrupted.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version and exit."
)
def app() -> None:
    """Look into a store of checkpoints and look after it. Needs no model; export and import need torch."""


@verb(
    "ls",
    "List the checkpoints.",
    "ickpt ls runs/17",
    "ickpt ls s3://bucket/runs/17 --json | jq '.[-1].step'",
)
@arguments.url
@arguments.as_json
def list_checkpoints(url: str, as_json: bool) -> Verb:
    """List the checkpoints of the store URL, oldest first."""

    def listed() -> int:
        from incremental_ckpt.cli import catalogue
        from incremental_ckpt.cli.places import open_place

        found = catalogue.read_catalogue(open_place(url))
        if as_json:
            from incremental_ckpt.cli.documents import to_json

            click.echo(to_json(catalogue.catalogue_json(found)))
        else:
            from incremental_ckpt.cli.catalogue_table import show_catalogue

            show_catalogue(url, found)
        if not found.unreadable:
            return 0
        first, *others = found.unreadable
        what = f"the equivalent base of seq {first.seq}" if first.equivalent else f"seq {first.seq}"
        more = f" (and {len(others)} more; `ickpt check` names them all)" if others else ""
        print_error(f"{what} cannot be read{more}: {first.error}")
        return code_of(first.error)

    return listed


@verb(
    "show",
    "Show one checkpoint in full.",
    "ickpt show runs/17",
    "ickpt show runs/17 --seq 4 --json | jq '.tables[].name'",
)
@arguments.url
@arguments.seq
@arguments.as_json
def show(url: str, seq: int | None, as_json: bool) -> Verb:
    """Show one checkpoint of the store URL: its facts, chain, tables, state and environment."""

    def shown() -> int:
        from incremental_ckpt.cli import facts
        from incremental_ckpt.cli.places import open_repository

        found = facts.checkpoint_facts(open_repository(url), seq)
        if as_json:
            _print_json(facts.facts_json(found))
        else:
            from incremental_ckpt.cli import tables

            tables.show_checkpoint(url, found)
        if not found.problems:
            return 0
        first, *others = found.problems
        more = f" (and {len(others)} more)" if others else ""
        told = first.what if first.key in first.what else f"{first.key}: {first.what}"
        print_error(f"not all of seq {found.checkpoint.seq} can be read{more}: {told}")
        return code_of(first.error)

    return shown


@verb("check", "Prove what can be restored.", "ickpt check runs/17", "ickpt check runs/17 --deep --json")
@arguments.url
@click.option("--deep", is_flag=True, help="Also read every row and verify every checksum.")
@arguments.as_json
def check(url: str, deep: bool, as_json: bool) -> Verb:
    """Prove that every checkpoint of the store URL can be restored, or say which can, and what to do."""

    def checked() -> int:
        from incremental_ckpt.cli import facts
        from incremental_ckpt.cli.places import open_repository
        from incremental_ckpt.cli.progress import checking
        from incremental_ckpt.cli.tables import verdict
        from incremental_ckpt.repository.check import check_repository

        repository = open_repository(url)
        with checking() as progress:
            report = check_repository(repository, deep=deep, progress=progress)
        found = facts.check_facts(repository, report, deep=deep)
        if as_json:
            _print_json(facts.check_json(found))
        else:
            from incremental_ckpt.cli import tables

            tables.show_check(url, found)
        if report.ok:
            return 0
        print_error(verdict(url, report))
        return CODES[FormatError if all(problem.newer for problem in report.problems) else CorruptionError]

    return checked


def _print_json(value: Any) -> None:
    from incremental_ckpt.cli.documents import to_json

    click.echo(to_json(value))


for _command in (list_checkpoints, show, check, *upkeep.COMMANDS):
    app.add_command(_command)
