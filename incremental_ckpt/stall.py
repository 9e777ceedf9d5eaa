"""What training waits for: the marks are frozen, then the changed rows and all state are copied to host memory.

It must not know other ranks, which save comes when, how one ends, nor how anything is encoded or written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from incremental_ckpt.model import ModelAdapter, Shard, Table
from incremental_ckpt.rank_writer import Content
from incremental_ckpt.settings import Settings
from incremental_ckpt.sharing import own_part, own_rows
from incremental_ckpt.snapshot import (
    FlatState,
    HostArena,
    Part,
    RowCopies,
    Rows,
    StateCopy,
    copied_bytes,
    flatten_state,
)
from incremental_ckpt.stream import RowStream
from incremental_ckpt.tracker import Tracker

_NONE = range(0)


@dataclass(frozen=True)
class Prepared:
    """What is found before the marks are frozen: tables, and state taken apart but not copied yet."""

    tables: Sequence[Table]
    state: FlatState

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(t.shard for t in self.tables)


class Snapshots:
    """One snapshot of a rank's part of the model after another, in the same host memory.

    Args:
        rank, world_size: whose part of what all ranks hold alike is taken.
    """

    def __init__(
        self, adapter: ModelAdapter, tracker: Tracker, settings: Settings, *, rank: int, world_size: int
    ) -> None:
        self._adapter = adapter
        self._tracker = tracker
        self._settings = settings
        self._rank, self._world_size = rank, world_size
        self._arena = HostArena(pinned=torch.cuda.is_available())

    def prepare(self, extra_state: Callable[[], Mapping[str, Any]]) -> Prepared:
        tables = self._adapter.tables()
        state = dict(self._adapter.state())
        replicated = frozenset(state.pop("replicated", ()))
        part = own_part(state, replicated, self._rank, self._world_size)
        return Prepared(tables, flatten_state({**part, **extra_state()}))

    def take(self, prepared: Prepared, *, base: bool) -> Content:
        """Freeze and copy. What was taken before must have been let go of.

        Args:
            base: all rows; else those that are marked.

        Raises:
            Exception: what was in the way; the marks are given back. On one of several ranks the content raises it
                instead, so that the vote tells the others, who are on their way.
        """
        tables = prepared.tables
        self._tracker.give_back()  # of a save that an interrupt has left frozen
        frozen = self._tracker.freeze(everything=base)
        try:
            rows = [own_rows(t, r, self._rank, self._world_size) for t, r in zip(tables, frozen, strict=True)]
            streamed = self._streamed(tables, rows, base=base)
            copied = [_NONE if s else r for r, s in zip(rows, streamed, strict=True)]
            self._arena.reserve(prepared.state.arena_bytes + copied_bytes(tables, copied))
            copies = RowCopies(tables, copied, self._arena)
            stream: RowStream | None = None
            if any(streamed):
                stream = RowStream(
                    tables, [r if s else _NONE for r, s in zip(rows, streamed, strict=True)],
                    pack_bytes=self._settings.pack_bytes, entry_bytes=self._settings.entry_bytes,
                    limit=self._settings.preimage_bytes,
                )  # fmt: skip
                self._tracker.tell_first_touches(stream, self._tracker.frozen_interval(everything=base))
            state = prepared.state.copy(self._arena)
        except BaseException as cause:
            self._tracker.tell_first_touches(None)
            if self._world_size > 1 and isinstance(cause, Exception):
                # The marks are given back by the outcome.
                return Content(prepared.tables, (), _Failing(cause), lambda: None)
            self._tracker.give_back()
            raise
        return self._content(tables, state, copies, stream)

    def _streamed(self, tables: Sequence[Table], rows: Sequence[Rows], *, base: bool) -> list[bool]:
        """Which tables are streamed: those whose updates are announced, if the stall should not copy them."""
        settings = self._settings
        large = base or copied_bytes(tables, rows) > settings.snapshot_bytes
        return [large and settings.stream and t.tracked for t in tables]

    def _content(
        self, tables: Sequence[Table], state: Sequence[StateCopy], copies: RowCopies, stream: RowStream | None
    ) -> Content:
        settings = self._settings

        def packfuls() -> Iterator[tuple[list[Part], bool]]:
            for packful in copies.packfuls(settings.pack_bytes, settings.entry_bytes):
                yield packful, False
            if stream is not None:
                yield from stream.packfuls()

        def end() -> None:
            if stream is not None:
                stream.end()

        return Content(tables, state, packfuls(), end)

    def release(self) -> None:
        self._arena.release()


class _Failing:
    """Packfuls of a rank that could not copy its rows."""

    def __init__(self, cause: Exception) -> None:
        self._cause = cause

    def __iter__(self) -> Iterator[tuple[list[Part], bool]]:
        raise self._cause
