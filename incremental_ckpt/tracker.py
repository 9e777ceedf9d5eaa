"""Which rows changed since the checkpoint that the next delta counts from: one byte per row, on the tables' device.

It must not know what a checkpoint is, nor who calls mark; it never waits for a device inside a training step.

A mark is the number of the *epoch* (the interval between two freezes) in which the row last changed. Rows to save are
those whose epoch is not older than ``_low``. Freezing begins a new epoch, confirming raises ``_low``, giving back
leaves it where it is: all three cost nothing, and no frozen copy of the map exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from incremental_ckpt.model import Table

_BLOCK = 1 << 20  # bytes of flags that are searched at once, a multiple of 8
_LAST_EPOCH = 255  # the map is uint8; 0 means never marked


class FirstTouch(Protocol):
    """Told of rows just before they change for the first time since a freeze."""

    @property
    def ended(self) -> bool:
        """Whether it needs no more rows."""

    def take(self, table: int, rows: torch.Tensor, first: torch.Tensor | None) -> None:
        """``rows[first]`` (all of ``rows`` if ``first`` is None) are about to change; ids may repeat. Called before the
        update, on its stream."""

    def spoil(self, table: int) -> None:
        """Rows of this table changed unannounced; what is being streamed is not exact any more."""


@dataclass(frozen=True)
class Interval:
    """The epochs whose rows a freeze covers: ``low <= epoch <= high``."""

    low: int
    high: int


@dataclass
class _Map:
    """The marks of all tables on one device, each table's bytes starting at a multiple of 8 so that words never span
    tables."""

    flags: torch.Tensor
    tables: list[int]
    starts: list[int]


class Tracker:
    """Marks rows between freezes. Not thread-safe: all calls come from the training thread.

    Args:
        tables: in the adapter's order; rows of untracked tables are never marked and always saved.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tracked = [t.tracked for t in tables]
        self._rows = [t.shard.rows for t in tables]
        self._views: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * len(tables)
        self._maps: list[_Map] = []
        by_device: dict[torch.device, list[int]] = {}
        for index, table in enumerate(tables):
            by_device.setdefault(table.tensors["weight"].device, []).append(index)
        for device, members in by_device.items():
            starts, end = [], 0
            for index in members:
                starts.append(end)
                end += (self._rows[index] + 7) // 8 * 8 if self._tracked[index] else 0
            flags = torch.zeros(end, dtype=torch.uint8, device=device)
            self._maps.append(_Map(flags, members, starts))
            for index, start in zip(members, starts, strict=True):
                self._views[index] = flags[start : start + (self._rows[index] if self._tracked[index] else 0)]
        self._numpy = [v.numpy() if v.device.type == "cpu" else None for v in self._views]
        self._epoch = 1
        self._low = 1
        self._frozen: int | None = None
        self._first_touch: FirstTouch | None = None
        self._first_touch_of = Interval(0, 0)

    @property
    def map_bytes(self) -> int:
        """Device memory of the map."""
        return sum(m.flags.numel() for m in self._maps)

    def mark(self, table: int, rows: torch.Tensor) -> None:
        """Rows of a table are about to change. Called in the update's thread and on its stream, before it.

        Args:
            rows: local ids, int32 or int64, any number of times each, on the table's device.
        """
        flags = self._numpy[table]
        if flags is None:
            self._mark_on_device(table, rows)
            return
        if not self._tracked[table]:
            return
        ids = rows.numpy()
        if self._first_touch is not None and not self._first_touch.ended:
            seen = flags[ids]
            first = ids[(seen >= self._first_touch_of.low) & (seen <= self._first_touch_of.high)]
            if first.size:
                self._first_touch.take(table, torch.from_numpy(np.unique(first)), None)
        flags[ids] = self._epoch

    def _mark_on_device(self, table: int, rows: torch.Tensor) -> None:
        if not self._tracked[table]:
            return
        flags, rows = self._views[table], rows.long()
        if self._first_touch is not None and not self._first_touch.ended:
            seen = flags.index_select(0, rows)
            # A compacted list would need its length on the host: a synchronisation. The mask travels along instead.
            first = (seen >= self._first_touch_of.low) & (seen <= self._first_touch_of.high)
            self._first_touch.take(table, rows, first)
        flags.index_fill_(0, rows, self._epoch)

    def mark_all(self, table: int) -> None:
        """Any row of a table may have changed."""
        if not self._tracked[table]:
            return
        self._views[table].fill_(self._epoch)
        if self._first_touch is not None:
            self._first_touch.spoil(table)

    def freeze(self, *, everything: bool = False) -> list[torch.Tensor | None]:
        """The rows marked since the last confirmed freeze; marks made from now on belong to the next one.

        Args:
            everything: for a base, which carries all rows: nothing is scanned.

        Returns:
            For each table ascending local ids, int64, on its device; None stands for all rows.
        """
        assert self._frozen is None, "a freeze is settled by confirm or give_back before the next (I5)"
        if self._epoch == _LAST_EPOCH:
            self._renumber()
        rows: list[torch.Tensor | None] = [None] * len(self._tracked)
        if not everything:
            for device_map in self._maps:
                self._scan(device_map, rows)
        self._frozen = self._epoch
        self._epoch += 1
        return rows

    def frozen_interval(self, *, everything: bool) -> Interval:
        """The epochs of the rows that the last freeze covers; ``everything`` as given to it."""
        assert self._frozen is not None
        return Interval(0 if everything else self._low, self._frozen)

    def confirm(self) -> None:
        """A committed checkpoint carries the frozen rows and the next delta counts from it: drop their marks (I5)."""
        assert self._frozen is not None
        self._low = self._frozen + 1
        self._frozen = None

    def give_back(self) -> None:
        """The frozen rows belong to the next delta as well: the save failed, or the next delta counts from an older
        parent."""
        self._frozen = None

    def reset(self) -> None:
        """All rows are as in the checkpoint that the next delta counts from (after a resume)."""
        for device_map in self._maps:
            device_map.flags.zero_()
        self._epoch = self._low = 1
        self._frozen = None

    def tell_first_touches(self, receiver: FirstTouch | None, of: Interval = Interval(0, 0)) -> None:
        """Tell the receiver of rows with an epoch in ``of`` before they change; None ends it."""
        self._first_touch, self._first_touch_of = receiver, of

    def _scan(self, device_map: _Map, rows: list[torch.Tensor | None]) -> None:
        if device_map.flags.device.type == "cpu":
            positions = torch.from_numpy(_marked_positions(device_map.flags.numpy(), self._low))
        else:
            positions = torch.nonzero(device_map.flags >= self._low).squeeze(1)
        tracked = [(i, s) for i, s in zip(device_map.tables, device_map.starts, strict=True) if self._tracked[i]]
        bounds = torch.tensor([s for _, s in tracked] + [device_map.flags.numel()], device=positions.device)
        cuts = torch.searchsorted(positions, bounds).tolist()
        for (index, start), begin, end in zip(tracked, cuts[:-1], cuts[1:], strict=True):
            rows[index] = positions[begin:end] - start

    def _renumber(self) -> None:
        for device_map in self._maps:
            device_map.flags.copy_(device_map.flags >= self._low)
        self._epoch, self._low = 2, 1


def _marked_positions(flags: np.ndarray, low: int) -> np.ndarray:
    """Ascending positions, int64, of the bytes that are at least ``low``.

    Block by block, so that what lies between the flags and the positions stays in the cache: temporaries as long as
    the map cost more in page faults than the search itself. Marks are sparse: words of eight flags are looked at first.
    One thread: right after a step the others are still taken, by the spinning workers of the step.
    """
    found = []
    marked = np.empty(min(_BLOCK, len(flags)), dtype=np.bool_)
    hit = np.empty(len(marked) // 8, dtype=np.bool_)
    for begin in range(0, len(flags), _BLOCK):
        block = flags[begin : begin + _BLOCK]
        np.greater_equal(block, low, out=marked[: len(block)])
        words = marked[: len(block)].view(np.uint64)
        np.not_equal(words, 0, out=hit[: len(words)])
        hit_words = np.flatnonzero(hit[: len(words)])
        if 2 * len(hit_words) > len(words):
            positions = np.flatnonzero(marked[: len(block)])
        else:
            in_words = np.flatnonzero(words[hit_words].view(np.bool_))
            positions = hit_words[in_words >> 3]
            positions <<= 3
            in_words &= 7
            positions += in_words
        positions += begin
        found.append(positions)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)
