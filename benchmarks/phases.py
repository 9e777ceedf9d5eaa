"""Where the time of a stall goes: the parts of ``save_checkpoint`` with a clock around each.

It knows the library's insides by name, and fails where they are renamed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from incremental_ckpt import checkpointer, planning, saving, stall
from incremental_ckpt.adapters.composite import CompositeAdapter
from incremental_ckpt.snapshot import FlatState, HostArena
from incremental_ckpt.tracker import Tracker

# They do not contain one another, so that they add up.
_PHASES: tuple[tuple[str, Any, str], ...] = (
    ("settle the save before", saving.Saver, "_settle"),
    ("find the tables", CompositeAdapter, "tables"),
    ("find the state", CompositeAdapter, "state"),
    ("random generators", checkpointer, "capture_rng"),
    ("plan", planning.Planner, "plan"),
    ("flatten the state", stall, "flatten_state"),
    ("scan the marks", Tracker, "freeze"),
    ("reserve memory", HostArena, "reserve"),
    ("gather the rows", stall, "RowCopies"),
    ("copy the state", FlatState, "copy"),
    ("hand over", saving.Background, "submit"),
)
REST = "the rest"
PHASES = (*(name for name, _, _ in _PHASES), REST)


class Phases:
    """Seconds by phase of the calls made within ``watching``."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        with ExitStack() as stack:
            for name, owner, attribute in _PHASES:
                original = getattr(owner, attribute)
                stack.enter_context(patch.object(owner, attribute, self._timed(name, original)))
            begun = time.perf_counter()
            yield
            whole = time.perf_counter() - begun
        self.seconds[REST] = whole - sum(self.seconds.values())

    def _timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return original(*arguments, **named)
            finally:
                self.seconds[name] += time.perf_counter() - begun

        return timed
