"""What several verbs take, and the form of their help: a sentence or two, the options, examples.

It must not know any verb.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

Verb = Callable[[], int]
"""A parsed command: run after click is done, so that its errors are ours to report. Returns the exit code."""

F = TypeVar("F", bound=Callable[..., Verb])


def _folders(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Tells a shell to complete a folder."""
    return [CompletionItem(incomplete, type="dir")]


class Number(click.IntRange):
    """A whole number from ``min`` on, told in the words of a person who typed something else."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            found = int(value)
        except ValueError:
            self.fail(f"{value!r} is no whole number", param, ctx)
        if self.min is not None and found < self.min:
            self.fail(f"{found} is too small: {self.min} at least", param, ctx)
        return found


class _VerbCommand(click.Command):
    """Its help ends with examples."""

    examples: Sequence[str] = ()

    def format_epilog(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def verb(name: str, short_help: str, *examples: str) -> Callable[[Callable[..., Verb]], click.Command]:
    """A command of ickpt, explained by its function's docstring."""

    def make(run: Callable[..., Verb]) -> click.Command:
        command = click.command(name, cls=_VerbCommand, short_help=short_help)(run)
        command.examples = examples
        return command

    return make


url = click.argument("url", metavar="URL", shell_complete=_folders)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON: a contract, see docs/operations.md.")
seq = click.option(
    "--seq",
    type=Number(min=1),
    metavar="N",
    show_default="the newest",
    help="Its number, as `ickpt ls` shows it.",
)


def path_argument(name: str, metavar: str) -> Callable[[F], F]:
    return click.argument(name, metavar=metavar, type=click.Path(path_type=Path))


def number_option(name: str, metavar: str, explained: str, least: int = 1) -> Callable[[F], F]:
    return click.option(name, type=Number(min=least), metavar=metavar, help=explained)
