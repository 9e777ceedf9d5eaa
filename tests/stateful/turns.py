"""One thread runs at a time: a scheduler hands the turn from actor to actor, at store operations and other pauses.

It must not know checkpoints. What real code waits with (events, conditions, a thread of its own, a thread pool) is
replaced by classes that wait by giving the turn away, so that a seed always gives the same run.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from incremental_ckpt.testing import Crash

Until = Callable[[], bool]


class Violation(BaseException):
    """An invariant does not hold."""


class Actor:
    """A thread that runs only when it is given the turn.

    Attributes:
        group: what it dies with (its job), or None.
        waits_for: what must hold before it can go on.
    """

    def __init__(self, turns: Turns, name: str, body: Callable[[], None], group: Any, speed: int) -> None:
        self.name, self.group, self.speed = name, group, speed
        self.waits_for: Until | None = None
        self.ended = False
        self.killed = False
        self._turns = turns
        self._body = body
        self._turn = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def runnable(self) -> bool:
        return not self.ended and (self.killed or self.waits_for is None or self.waits_for())

    def step(self) -> None:
        """Let it run to its next pause. Called by the scheduler."""
        self._turns.current = self
        self._turn.release()
        self._turns.back.acquire()
        self._turns.current = None
        if self.ended:
            self._thread.join()

    def pause(self, until: Until | None = None) -> None:
        """Give the turn away; it comes back when the scheduler likes, and not before ``until`` holds. By the actor."""
        if self.killed:
            raise Crash(self.name)
        self.waits_for = until
        self._turns.back.release()
        self._turn.acquire()
        self.waits_for = None
        if self.killed:
            raise Crash(self.name)

    def kill(self) -> None:
        """Its next pause, or the one it is in, raises Crash. What it does on the way out happens in memory only."""
        self.killed = True

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self.killed:
                self._body()
        except Crash:
            pass
        except Violation as violation:
            self._turns.violation = self._turns.violation or violation
        except BaseException as error:
            found = Violation(f"ERROR: {self.name}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
            self._turns.violation = self._turns.violation or found
        self.ended = True
        self._turns.back.release()


class Turns:
    """Whose turn it is. ``current`` is None while the scheduler itself runs."""

    def __init__(self) -> None:
        self.back = threading.Semaphore(0)
        self.current: Actor | None = None
        self.actors: list[Actor] = []
        self.violation: Violation | None = None

    def spawn(self, name: str, body: Callable[[], None], group: Any = None, speed: int = 3) -> Actor:
        actor = Actor(self, name, body, group, speed)
        self.actors.append(actor)
        return actor

    def pause(self, until: Until | None = None) -> None:
        """Whoever has the turn gives it away; the scheduler itself goes on."""
        if self.current is not None:
            self.current.pause(until)
        elif until is not None and not until():
            raise Violation("HANG: something waits that nothing will wake")

    def alive(self) -> None:
        """Raises Crash in an actor that was killed."""
        if self.current is not None and self.current.killed:
            raise Crash(self.current.name)

    def bury(self) -> None:
        """Let the killed unwind, forget the ended, and raise what anybody found."""
        for actor in self.actors:
            while actor.killed and not actor.ended:
                actor.step()
        self.actors = [a for a in self.actors if not a.ended]
        if self.violation is not None:
            raise self.violation

    def kill_all(self) -> None:
        for actor in self.actors:
            actor.kill()
            while not actor.ended:
                actor.step()
        self.actors = []


turns = Turns()
"""Of the run that is going on. Runs do not overlap."""


def begin_run() -> Turns:
    global turns
    turns.kill_all()
    turns = Turns()
    return turns


class TurnEvent:
    """A threading.Event."""

    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def wait(self, timeout: float | None = None) -> bool:
        """A timeout ends the wait only where it is zero: no run takes as long as the others."""
        if not self._set and timeout != 0:
            turns.pause(self.is_set)
        return self._set


class TurnCondition:
    """A threading.Condition; nobody else runs while its lock is held, since nobody gives the turn away there."""

    def __init__(self) -> None:
        self._notified = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        self._notified += 1

    def wait(self) -> None:
        seen = self._notified
        turns.pause(lambda: self._notified != seen)


class Inline:
    """A ThreadPoolExecutor that does the work at once."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None:
        pass
