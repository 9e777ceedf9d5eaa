"""The progress bar of long verbs, on stderr and only where that is a terminal.

It must not know what is being done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from incremental_ckpt.cli import text
from incremental_ckpt.cli.terminal import is_capable


@contextmanager
def checking() -> Iterator[Callable[[int, int, int], None] | None]:
    """What check_repository reports to, gone from the screen at the end; None where stderr shows no moving bar."""
    if not is_capable(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[read]} read"),
        TimeElapsedColumn(), console=Console(file=sys.stderr), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None, read=text.size(0))

        def progress(done: int, total: int, bytes_read: int) -> None:
            bar.update(task, completed=done, total=total, read=text.size(bytes_read))

        yield progress


@contextmanager
def moving(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """What reports bytes done and bytes in all; None where stderr shows no moving bar."""
    if not is_capable(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=Console(file=sys.stderr), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
