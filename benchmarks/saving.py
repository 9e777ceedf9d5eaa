"""Saves of the training in a folder of their own, each with its wall time and its event.

It must not know what is made of the times.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from workload import Training

from incremental_ckpt import Checkpointer, EverySteps, SaveEvent, SaveHandle, Settings
from incremental_ckpt.adapters import adapt
from incremental_ckpt.events import Event
from incremental_ckpt.format.rank_facts import Entry, ShardEntries
from incremental_ckpt.format.rank_manifest import RankManifest
from incremental_ckpt.format.rowset import decode_rows
from incremental_ckpt.model import WEIGHT
from incremental_ckpt.policy import KindPolicy
from incremental_ckpt.repository import Repository
from incremental_ckpt.storage import open_store

DELTA: KindPolicy = "consecutive"
BASE: KindPolicy = "full"
_NEVER = EverySteps(1 << 40)


@dataclass(frozen=True)
class Saved:
    """One durable save.

    Attributes:
        wall_seconds: of the ``save_checkpoint`` call.
        durable_seconds: from the call until the save was durable.
        event: the library's own account.
    """

    wall_seconds: float
    durable_seconds: float
    event: SaveEvent


class Saves:
    """One Checkpointer on a store in ``folder``.

    Args:
        remove: the folder, at the end.
        low_priority: False where only what is written counts, not beside what.
    """

    def __init__(
        self, training: Training, folder: Path, codec: str = "raw", *, remove: bool = True, low_priority: bool = True
    ) -> None:
        self._training = training
        self._remove = remove
        self._folder = folder
        self._events: dict[int, SaveEvent] = {}
        self.checkpointer = Checkpointer(
            training.model, folder, optimizer=training.optimizer, when=_NEVER, codec=codec, on_event=self._keep,
            settings=Settings(low_priority=low_priority),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.checkpointer.__exit__(kind, error, trace)
        finally:
            if self._remove:
                shutil.rmtree(self._folder, ignore_errors=True)

    def begin(self, kind: KindPolicy) -> tuple[SaveHandle, float]:
        """A handle, and the seconds that the call took."""
        begun = time.perf_counter()
        handle = self.checkpointer.save_checkpoint(self._training.steps, kind=kind)
        return handle, time.perf_counter() - begun

    def save(self, kind: KindPolicy) -> Saved:
        """A save from its call until it is durable, with nothing beside it."""
        begun = time.perf_counter()
        handle, wall = self.begin(kind)
        handle.wait()
        return Saved(wall, time.perf_counter() - begun, self.event(handle))

    def event(self, handle: SaveHandle) -> SaveEvent:
        """Of a save that is durable."""
        if handle.seq not in self._events:
            self.checkpointer.step(self._training.steps)
        return self._events[handle.seq]

    def start(self) -> Saved:
        """A base and one delta, after which all buffers are there and touched; returns the delta."""
        self.save(BASE)
        self._training.interval()
        return self.save(DELTA)

    def mark_touched(self) -> None:
        """Mark the rows that an interval touches, without updating them."""
        names = [t.shard.table.rsplit(".", 1)[-1] for t in self.checkpointer._adapter.tables()]
        for index, name in enumerate(names):
            rows = self._training.touched[int(name.removeprefix("C")) - 1]
            if rows.size:
                self.checkpointer._tracker.mark(index, torch.from_numpy(rows))

    def chain(self, seq: int) -> list[int]:
        """The checkpoints that a resume from ``seq`` reads."""
        return [each.seq for each in Repository(open_store(self._folder)).chain(seq)]

    def votes(self, seq: int) -> list[RankManifest]:
        repository = Repository(open_store(self._folder))
        return repository.rank_manifests(repository.manifest(seq))

    def rows_of(self, seq: int) -> dict[str, np.ndarray]:
        """The rows that a delta carries by table, ascending int64; all rows of a table that is not tracked."""
        return {
            part.shard.table: np.concatenate(
                [
                    np.empty(0, np.int64),
                    *(self._rows_of_entry(vote, part, e) for e in part.entries if e.field == WEIGHT),
                ]
            )
            for vote in self.votes(seq)
            for part in vote.shards
        }

    def _rows_of_entry(self, vote: RankManifest, part: ShardEntries, entry: Entry) -> np.ndarray:
        if isinstance(entry.rows, range):
            return np.arange(entry.rows.start, entry.rows.stop, dtype=np.int64)
        rowset = part.rowsets[entry.rows]
        key = vote.packs[rowset.at.pack].key
        raw = open_store(self._folder).get(key, rowset.at.begin, rowset.at.end)
        return decode_rows(raw, count=rowset.count, rows=part.shard.rows, key=key)

    def drop_objects(self) -> None:
        """Free the disk of all packs. Holes of their size stay, which the next delta takes for what it counts from;
        nothing may be in flight, and nothing can be resumed."""
        for pack in (self._folder / "data").glob("*/*.safetensors"):
            size = pack.stat().st_size
            os.truncate(pack, 0)
            os.truncate(pack, size)
        os.sync()

    def _keep(self, event: Event) -> None:
        if isinstance(event, SaveEvent):
            self._events[event.seq] = event


class BareGather:
    """``torch.index_select(out=)`` of given rows of all tables and fields into buffers whose pages are touched."""

    def __init__(self, training: Training, rows: dict[str, np.ndarray]) -> None:
        self._calls = []
        self.bytes = 0
        for table in adapt(training.model, training.optimizer).tables():
            ids = torch.from_numpy(rows[table.shard.table])
            for live in table.tensors.values():
                if ids.numel():
                    out = torch.zeros(ids.numel(), live.shape[1], dtype=live.dtype)
                    self._calls.append((live.detach(), ids, out))
                    self.bytes += out.nbytes
        self()

    def __call__(self) -> None:
        for live, ids, out in self._calls:
            torch.index_select(live, 0, ids, out=out)
