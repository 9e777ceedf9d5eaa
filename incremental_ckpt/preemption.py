"""SIGTERM: the machine is about to be taken away, and there are some seconds left for one last save.

It must not know what a save is. A process whose loop does not come by in time ends as if nobody had listened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger("incremental_ckpt")

EXIT_CODE = 128 + signal.SIGTERM
_TELL_SECONDS = 1.0


class Preemption:
    """Listens for the first SIGTERM; a second one ends the process as it would have without this.

    Args:
        grace_seconds: between the signal and the end of the process, whatever it is doing; 0: do not listen.
        lost: says what is lost where the process ends before its loop has come by; asked from another thread.
    """

    def __init__(
        self,
        grace_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        lost: Callable[[], str] = lambda: "the steps since the last save are lost",
    ) -> None:
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._lost = lost
        self._before: Any = None
        self._listens = False
        self._arrived_at: float | None = None
        self._deadline: threading.Timer | None = None
        self._process = os.getpid()

    @property
    def arrived(self) -> bool:
        return self._arrived_at is not None

    @property
    def remaining(self) -> float:
        """Seconds left; the whole grace where no signal has come."""
        if self._arrived_at is None:
            return self._grace_seconds
        return max(0.0, self._arrived_at + self._grace_seconds - self._clock())

    def listen(self) -> None:
        """From the main thread; elsewhere, and when it listens already, this does nothing."""
        if self._listens or not self._grace_seconds or threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGTERM)
        if before is None or before is signal.SIG_IGN:
            return  # not a Python handler, or the signal is meant to be ignored
        self._before = before
        signal.signal(signal.SIGTERM, self._take)
        self._listens = True

    def stop_listening(self) -> None:
        """Whoever listened before listens again."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._listens and signal.getsignal(signal.SIGTERM) == self._take:
            with contextlib.suppress(ValueError):  # not on the main thread: the handler stays, and passes signals on
                signal.signal(signal.SIGTERM, self._before)
                self._listens = False

    def leave(self) -> None:
        """The last save is durable: hand the signal to whoever listened before, else end the process.

        Raises:
            SystemExit: with code 143.
        """
        was_for_us = self.arrived
        self.stop_listening()
        self._arrived_at = None
        if was_for_us and callable(self._before):
            self._before(signal.SIGTERM, None)
            return
        raise SystemExit(EXIT_CODE)

    def hand_on(self) -> None:
        """After closing: a signal that came too late for a last save is for whoever listened before."""
        if self.arrived:
            self._arrived_at = None
            os.kill(os.getpid(), signal.SIGTERM)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        # Forked workers have inherited this handler, and must die of the signal as their parent expects.
        if os.getpid() != self._process or not self._listens:
            signal.signal(signal.SIGTERM, self._before)
            os.kill(os.getpid(), number)
            return
        signal.signal(signal.SIGTERM, self._before)
        self._listens = False
        self._arrived_at = self._clock()
        self._deadline = threading.Timer(self._grace_seconds, self._end)
        self._deadline.daemon = True
        self._deadline.start()
        # The code that the signal has interrupted may hold the locks of the log.
        with contextlib.suppress(RuntimeError):  # no thread can be had: the last save matters more than this line
            threading.Thread(target=self._tell_arrival, daemon=True).start()

    def _tell_arrival(self) -> None:
        log.warning(
            "SIGTERM: the next step() saves, then the process ends; without one it ends in %g s "
            "(Settings.grace_seconds)",
            self._grace_seconds,
        )

    def _tell_end(self) -> None:
        log.error(
            "SIGTERM: the grace period of %g s is over and the process ends; %s", self._grace_seconds, self._lost()
        )

    def _end(self) -> None:
        try:
            telling = threading.Thread(target=self._tell_end, daemon=True)
            telling.start()
            telling.join(_TELL_SECONDS)  # a log that does not answer must not keep the process alive
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
