"""Writes the events of a checkpointer as TensorBoard scalars: an ``on_event``.

It must not know checkpointers, only their events.
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any, Protocol

from incremental_ckpt.events import (
    CompactEvent,
    Event,
    FailureEvent,
    IntervalEvent,
    PruneEvent,
    ResumeEvent,
    SaveEvent,
    SkipEvent,
)


class ScalarWriter(Protocol):
    """What is used of a SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class TensorBoardWriter:
    """Give it as ``on_event`` on one rank. Scalars are named ``<prefix>/save/bytes`` and so on, by the fields of the
    events; steps are training steps.

    Args:
        writer: a SummaryWriter, which stays the caller's, or a folder for a new one (needs ``tensorboard``, the extra
            of the same name).
    """

    def __init__(self, writer: ScalarWriter | str | os.PathLike[str], prefix: str = "incremental_ckpt") -> None:
        self._own: Any = None
        if isinstance(writer, str | os.PathLike):
            from torch.utils.tensorboard.writer import SummaryWriter  # torch without tensorboard has no such module

            self._own = writer = SummaryWriter(os.fspath(writer))
        self._writer = writer
        self._prefix = prefix

    def __call__(self, event: Event) -> None:
        match event:
            case SaveEvent():
                self._add("save", event, share=event.share, base=float(event.kind == "base"))
            case FailureEvent():
                self._writer.add_scalar(f"{self._prefix}/failure/seq", event.seq, event.step)
            case SkipEvent():
                self._add("skip", event)
            case ResumeEvent():
                self._add("resume", event, passed_over=len(event.passed_over))
            case IntervalEvent():
                self._add("interval", event)
            case PruneEvent():
                self._add("prune", event, forgotten=len(event.forgotten), failures=len(event.failures))
            case CompactEvent():
                self._add("compact", event, failed=float(bool(event.failure)))

    def close(self) -> None:
        """Close the writer, if it was made here."""
        if self._own is not None:
            self._own.close()

    def _add(self, name: str, event: Event, **more: float) -> None:
        facts = {f.name: getattr(event, f.name) for f in fields(event)}
        numbers = {k: v for k, v in facts.items() if isinstance(v, int | float) and k not in ("step", "epoch")}
        for key, value in {**numbers, **more}.items():
            self._writer.add_scalar(f"{self._prefix}/{name}/{key}", value, event.step)
