"""Ctrl-C: the first one is a KeyboardInterrupt as ever, one more ends the process at once and without a traceback.

It must not know what is interrupted. Whatever a verb writes may be cut off anywhere, so nothing is lost by it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType


class Interrupts:
    """From the beginning of a command to its end.

    Attributes:
        seen: there was one; what fails from now on may fail because of it.
        told: the user has been told.
    """

    def __init__(self, message: str, code: int) -> None:
        """
        Args:
            message: written to stderr once.
            code: exit code of a process that ends at once.
        """
        self.seen = False
        self.told = False
        self._message = message
        self._code = code
        # Where somebody else has decided on Ctrl-C (`nohup`, a shell's background job, an embedding program) it stays.
        self._ours = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._ours:
            signal.signal(signal.SIGINT, self._first)

    def tell(self) -> None:
        """Past Python's buffers: a signal may come while they are being written to."""
        if not self.told:
            self.told = True
            with suppress(OSError, ValueError):  # nobody is left to tell
                os.write(sys.stderr.fileno(), self._message.encode())

    def end(self) -> None:
        """Give Ctrl-C back, unless there was one: then the process is about to exit, and one more must not disturb."""
        if self._ours and not self.seen:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _first(self, _: int, __: FrameType | None) -> None:
        self.seen = True
        signal.signal(signal.SIGINT, self._second)
        raise KeyboardInterrupt

    def _second(self, _: int, __: FrameType | None) -> None:
        self.tell()
        if sys.stderr.isatty():
            with suppress(OSError):
                os.write(sys.stderr.fileno(), b"\x1b[?25h")  # a progress bar had hidden the cursor
        os._exit(self._code)
