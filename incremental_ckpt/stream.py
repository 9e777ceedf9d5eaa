"""Rows copied out in the background while training goes on, exact as of the moment the stream began (design.md, "A base
without stall").

It must not know the tracker, codecs or stores; it is told of a row before the row changes for the first time.

Why it is exact: a chunk is copied, then its table's watermark is raised past it, then the old values taken so far are
laid over it. A row taken (before its update) while the watermark was below it is laid over the chunk, whatever the copy
saw. A row taken after that moment changes after the copy had ended. A row above the watermark is not taken at all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from incremental_ckpt.errors import SaveError
from incremental_ckpt.model import Table
from incremental_ckpt.snapshot import Part, Rows, ids_of, room, rows_per_entry


@dataclass
class _OldValues:
    """Rows of one table before a change: ascending distinct ids and their fields (``uint8``) once they are on the
    host."""

    rows: torch.Tensor
    first: torch.Tensor | None
    fields: list[torch.Tensor]
    ready: torch.cuda.Event | None
    nbytes: int

    def on_host(self) -> tuple[np.ndarray, list[np.ndarray]]:
        if self.ready is not None:
            self.ready.synchronize()
        rows = self.rows.cpu().numpy()
        fields = [f.cpu().numpy() for f in self.fields]
        if self.first is not None:
            # Within one batch a row may be met twice; both times its old value was copied, so either will do.
            kept, at = np.unique(rows[self.first.cpu().numpy()], return_index=True)
            chosen = np.flatnonzero(self.first.cpu().numpy())[at]
            rows, fields = kept, [f[chosen] for f in fields]
        return rows, fields


class RowStream:
    """The rows of tables as they were when the stream was made, in packfuls.

    Args:
        tables: all tables; ``wanted[i]`` says which rows of table i are streamed.
        pack_bytes: size of the one buffer, and so of a packful.
        entry_bytes: size limit of one field of a part.
        limit: bytes of old values held at most; ``take`` waits for the background thread where it is reached.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        wanted: Sequence[Rows],
        *,
        pack_bytes: int,
        entry_bytes: int,
        limit: int,
    ) -> None:
        self._tables = tables
        self._wanted = [ids_of(t, w) for t, w in zip(tables, wanted, strict=True)]
        self._pack_bytes = pack_bytes
        self._entry_bytes = entry_bytes
        self._limit = limit
        # What is not streamed needs no old values.
        self._watermarks = [
            w.start if isinstance(w, range) and w else 0 if len(w) else t.shard.rows
            for t, w in zip(tables, self._wanted, strict=True)
        ]
        self._old: dict[int, list[_OldValues]] = {}
        self._old_bytes = 0
        self._awaited = False  # take() waits for room
        self._spoiled: str | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._live = [[_bytes_view(t.tensors[f.name]) for f in t.shard.fields] for t in tables]
        # On a GPU an update may still be queued: the copies wait for all that was queued when the stream was made.
        self._started: dict[torch.device, torch.cuda.Event] = {}
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        for table in tables:
            device = table.tensors["weight"].device
            if device.type == "cuda" and device not in self._started:
                self._started[device] = torch.cuda.current_stream(device).record_event()
                self._side[device] = torch.cuda.Stream(device)

    @property
    def rows(self) -> int:
        return sum(map(len, self._wanted))

    @property
    def ended(self) -> bool:
        """Whether all rows are copied, or the stream was given up."""
        return self._ended

    def take(self, table: int, rows: torch.Tensor, first: torch.Tensor | None) -> None:
        """Keep the old values of rows that are about to change. Training thread, on the stream of the update."""
        if self._ended:
            return
        watermark = self._watermarks[table]
        if first is None:
            # Rows come ascending here: those below the watermark are already copied.
            rows = rows[int(np.searchsorted(rows.numpy(), watermark)) :]
            if not rows.numel():
                return
        else:
            first = first & (rows >= watermark)
        fields = [live.index_select(0, rows) for live in self._live[table]]
        ready = None
        if rows.device.type == "cuda":
            ready = torch.cuda.current_stream(rows.device).record_event()
        nbytes = sum(f.nbytes for f in fields) + rows.nbytes
        with self._changed:
            while self._old_bytes + nbytes > self._limit and self._old_bytes and not self._ended:
                self._awaited = True
                self._changed.wait()
            self._awaited = False
            if self.ended:
                return
            self._old.setdefault(table, []).append(_OldValues(rows, first, fields, ready, nbytes))
            self._old_bytes += nbytes
            self._changed.notify_all()

    def spoil(self, table: int) -> None:
        """Rows changed without being announced: the stream cannot be exact any more, and raises SaveError."""
        # Also behind the watermark: this comes after the change, and what was copied between the two is wrong.
        if not self._ended:
            self._spoiled = self._tables[table].shard.table

    def end(self) -> None:
        """No more rows are streamed; ``take`` returns at once from now on. Any thread."""
        with self._changed:
            self._ended = True
            self._old.clear()
            self._old_bytes = 0
            self._changed.notify_all()

    def packfuls(self) -> Iterator[tuple[list[Part], bool]]:
        """Lists of parts, and whether they are spilled old values (which override what comes from the tables, whatever
        the order in which they are yielded). The arrays are valid until the next item is asked for. Background thread.

        Raises:
            SaveError: rows changed unannounced.
        """
        buffer = torch.empty(self._pack_bytes, dtype=torch.uint8, pin_memory=bool(self._side))
        packful: list[Part] = []
        used = 0
        for index, rows in self._chunks():
            widths = [live.shape[1] for live in self._live[index]]
            need = room([len(rows) * w for w in widths])
            if packful and used + need > self._pack_bytes:
                yield self._exact(packful), False
                packful, used = [], 0
                while self._old and (self._awaited or self._old_bytes > self._limit // 2):
                    yield from self._spilled(buffer)
            if need > buffer.numel():
                buffer = torch.empty(need, dtype=torch.uint8, pin_memory=bool(self._side))
            fields = []
            for live, width in zip(self._live[index], widths, strict=True):
                target = buffer[used : used + len(rows) * width].view(len(rows), width)
                self._copy_chunk(live, rows, target)
                fields.append(target.numpy())
                used += room([len(rows) * width])
            if (side := self._side.get(self._live[index][0].device)) is not None:
                side.synchronize()
            packful.append(Part(index, rows, tuple(fields)))
            self._watermarks[index] = int(rows[-1]) + 1
        if packful:
            yield self._exact(packful), False
        for index, table in enumerate(self._tables):
            if len(self._wanted[index]) and table.edited():
                self.spoil(index)
        if self._spoiled is not None:
            raise SaveError(
                f"rows of table {self._spoiled} changed while it was being streamed, and not through an optimizer "
                "that is watched "
                "(load_state_dict, an in-place edit): the save cannot be exact. Wait for the save before such an edit"
            )
        self.end()

    def _chunks(self) -> Iterator[tuple[int, range | np.ndarray]]:
        for index, (table, wanted) in enumerate(zip(self._tables, self._wanted, strict=True)):
            step = rows_per_entry([live.shape[1] for live in self._live[index]], self._entry_bytes)
            step = max(1, min(step, self._pack_bytes // max(1, table.shard.row_bytes + 1)))
            ids = wanted if isinstance(wanted, range) else wanted.cpu().numpy()
            for begin in range(0, len(ids), step):
                yield index, ids[begin : begin + step]
            self._watermarks[index] = table.shard.rows

    def _copy_chunk(self, live: torch.Tensor, rows: range | np.ndarray, target: torch.Tensor) -> None:
        device = live.device
        if device.type == "cpu":
            source = live.numpy()
            if isinstance(rows, range):
                np.copyto(target.numpy(), source[rows.start : rows.stop])
            else:
                np.take(source, rows, axis=0, out=target.numpy(), mode="clip")
            return
        side = self._side[device]
        side.wait_event(self._started[device])
        with torch.cuda.stream(side):
            chunk = live[rows.start : rows.stop] if isinstance(rows, range) else live[torch.from_numpy(rows).to(device)]
            target.copy_(chunk, non_blocking=True)

    def _exact(self, packful: list[Part]) -> list[Part]:
        """Lay the old values taken so far over the chunks, and forget those that no later chunk needs."""
        for part in packful:
            with self._changed:
                blocks = list(self._old.get(part.table, ()))
            begin, end = int(part.rows[0]), int(part.rows[-1]) + 1
            for block in blocks:
                ids, values = block.on_host()
                inside = np.flatnonzero((ids >= begin) & (ids < end))
                if isinstance(part.rows, range):
                    at = ids[inside] - begin
                else:
                    at = np.searchsorted(part.rows, ids[inside])
                    same = part.rows[np.minimum(at, len(part.rows) - 1)] == ids[inside]
                    inside, at = inside[same], at[same]
                for target, value in zip(part.fields, values, strict=True):
                    target[at] = value[inside]
        for table in {part.table for part in packful}:
            self._forget_below(table, self._watermarks[table])
        return packful

    def _forget_below(self, table: int, watermark: int) -> None:
        with self._changed:
            kept = []
            for block in self._old.get(table, ()):
                ids, values = block.on_host()
                begin = int(np.searchsorted(ids, watermark))
                if block.first is None and 2 * begin < len(ids):
                    kept.append(block)  # copying what is left of every block at every packful would be quadratic
                    continue
                self._old_bytes -= block.nbytes
                if begin < len(ids):
                    rows = torch.from_numpy(ids[begin:].copy())
                    fields = [torch.from_numpy(v[begin:].copy()) for v in values]
                    nbytes = sum(f.nbytes for f in fields) + rows.nbytes
                    kept.append(_OldValues(rows, None, fields, None, nbytes))
                    self._old_bytes += nbytes
            if kept:
                self._old[table] = kept
            else:
                self._old.pop(table, None)
            self._changed.notify_all()

    def _spilled(self, buffer: torch.Tensor) -> Iterator[tuple[list[Part], bool]]:
        """Give out the oldest of the old values of the table that has most, about a packful, through the buffer: their
        memory is free again before they are written."""
        with self._changed:
            table = max(self._old, key=lambda t: sum(b.nbytes for b in self._old[t]))
            blocks, kept = self._oldest(self._old.pop(table))
            if kept:
                self._old[table] = kept
        widths = [live.shape[1] for live in self._live[table]]
        ids = np.concatenate([block.on_host()[0] for block in blocks]).astype(np.int64)
        order = np.argsort(ids, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        need = room([len(ids) * w for w in widths])
        if need > buffer.numel():
            buffer = torch.empty(need, dtype=torch.uint8)
        fields, used = list[np.ndarray](), 0
        for width in widths:
            fields.append(buffer[used : used + len(ids) * width].view(len(ids), width).numpy())
            used += room([len(ids) * width])
        begin = 0
        while blocks:
            block = blocks.pop(0)
            rows, values = block.on_host()
            for target, value in zip(fields, values, strict=True):
                target[place[begin : begin + len(rows)]] = value
            begin += len(rows)
            with self._changed:
                self._old_bytes -= block.nbytes
                self._changed.notify_all()
        ids = ids[order]
        wanted = self._wanted[table]
        if not isinstance(wanted, range) or len(wanted) < self._tables[table].shard.rows:
            if isinstance(wanted, range):
                inside = (ids >= wanted.start) & (ids < wanted.stop)
            else:
                inside = np.isin(ids, wanted.cpu().numpy(), assume_unique=True)
            ids, fields = ids[inside], [f[inside] for f in fields]
        step = rows_per_entry(widths, self._entry_bytes)
        parts = [
            Part(table, ids[b : b + step], tuple(f[b : b + step] for f in fields)) for b in range(0, len(ids), step)
        ]
        if parts:
            yield parts, True

    def _oldest(self, blocks: list[_OldValues]) -> tuple[list[_OldValues], list[_OldValues]]:
        """The first blocks, as many as fit into the buffer but at least one, and the others."""
        nbytes = np.cumsum([block.nbytes for block in blocks])
        count = max(1, int(np.searchsorted(nbytes, self._pack_bytes, side="right")))
        return blocks[:count], blocks[count:]


def _bytes_view(live: torch.Tensor) -> torch.Tensor:
    """``uint8 [rows, row bytes]``, the same memory."""
    live = live.detach()
    if live.numel() == 0:
        return torch.empty(
            live.shape[0], live.element_size() * (live.shape[1] if live.dim() > 1 else 1), dtype=torch.uint8
        )
    return live.view(torch.uint8)
