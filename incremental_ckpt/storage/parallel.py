"""Runs independent calls in a few threads, until the first one fails.

It must not know what the calls do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


def run_all(calls: Iterable[Callable[[], object]], threads: int) -> None:
    """Make all calls, in ``threads`` threads of which the caller's is one; returns when none runs any more.

    The threads are new ones, so that they have the priority of their caller, and start also while the interpreter exits
    (an executor refuses work then).

    Raises:
        BaseException: the first failure; calls that had not begun by then are not made.
    """
    remaining = iter(calls)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        while True:
            with lock:
                call = None if failures else next(remaining, None)
            if call is None:
                return
            try:
                call()
            except BaseException as failure:  # raised below, in the caller's thread
                with lock:
                    failures.append(failure)

    others = [threading.Thread(target=work, name="store", daemon=True) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    try:
        work()
    except BaseException as interrupt:  # a signal between two calls
        with lock:
            failures.append(interrupt)
    for thread in others:
        thread.join()
    if failures:
        raise failures[0]
