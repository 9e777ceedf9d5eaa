"""``ickpt``: runs a verb and turns whatever goes wrong into one line on stderr and an exit code (docs/operations.md).

It must not know the verbs, and imports nothing at the top that takes time: Ctrl-C while the rest loads is answered too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from incremental_ckpt.cli.interrupts import Interrupts
from incremental_ckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptionError,
    FormatError,
    MismatchError,
    NotFoundError,
    SaveError,
    StorageError,
)

__all__ = ["CODES", "INTERRUPTED", "PIPE_CLOSED", "UNEXPECTED", "USAGE", "code_of", "main", "print_error"]

UNEXPECTED = 1
USAGE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
CODES: dict[type[CheckpointError], int] = {
    NotFoundError: 3,
    ConflictError: 4,
    CorruptionError: 5,
    FormatError: 6,
    MismatchError: 7,
    SaveError: 8,
    StorageError: 9,
}
"""Exit codes, a contract: one per error class."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        args: its arguments; None: those of the process.

    Returns:
        The exit code. Nothing is raised.
    """
    _prepare_streams()
    interrupts = Interrupts("ickpt: interrupted\n", INTERRUPTED)
    try:
        return _answered(sys.argv[1:] if args is None else args, interrupts)
    except KeyboardInterrupt:  # while an error was being told
        interrupts.tell()
        return INTERRUPTED
    finally:
        interrupts.end()


def _answered(args: Sequence[str], interrupts: Interrupts) -> int:
    try:
        from incremental_ckpt.cli.commands import run

        code = run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        with suppress(OSError):
            sys.stdout.flush()
        interrupts.tell()
        return INTERRUPTED
    except BrokenPipeError:
        # Who reads the output has seen enough, as `head` has: no error to them, and nobody to tell.
        _discard_output()
        return PIPE_CLOSED
    except CheckpointError as error:
        return _failed(str(error), code_of(error))
    except OSError as error:
        _discard_output()  # files of a store report StorageError: this is stdout
        return _failed(f"cannot write the output: {error.strerror or error}", UNEXPECTED)
    except Exception as error:
        if interrupts.seen:  # raised in the middle of an import of compiled code, say
            raise KeyboardInterrupt from error
        if os.environ.get("ICKPT_TRACEBACK"):
            raise
        return _failed(
            f"unexpected {type(error).__name__}: {error}. This is a fault in ickpt; ICKPT_TRACEBACK=1 shows where",
            UNEXPECTED,
        )
    return code


def code_of(error: CheckpointError) -> int:
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), UNEXPECTED)


def print_error(message: str) -> None:
    """One line on stderr, after what stdout has still to show."""
    from incremental_ckpt.cli.text import printable

    sys.stdout.flush()
    with suppress(OSError, ValueError):  # nobody is left to tell
        sys.stderr.write(f"ickpt: {printable(message)}\n")
        sys.stderr.flush()


def _failed(message: str, code: int) -> int:
    try:
        print_error(message)
    except OSError:
        _discard_output()
    return code


def _prepare_streams() -> None:
    """Make output possible whatever the process was started with: a closed stream, an encoding without a character."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(null, "w", closefd=False))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter's own flush at exit finds no closed pipe."""
    with suppress(OSError, ValueError):
        stdout = sys.stdout.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stdout)
        os.close(null)
