"""What a save tells of itself, in its line of the log and in its event, is what the store holds and the clock says."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from incremental_ckpt import Checkpointer, Repository, SaveEvent, Settings
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore, Op, Perform
from incremental_ckpt.testing.stores import WRITES

ROWS, CHANGED = 40, 10
STATE_SECONDS, WRITE_SECONDS = 2.0, 0.5


class Watched:
    """A run of two saves on a clock of its own: state takes time to copy, and so does each write."""

    def __init__(self, store_name: str) -> None:
        self.now = 100.0
        self.writes = 0
        self.writes_of: dict[int, int] = {}
        self.events: list[SaveEvent] = []
        model = torch.nn.EmbeddingBag(ROWS, 16, mode="sum", sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
        with Checkpointer(
            model, FaultStore(MemoryStore(store_name), self._write), optimizer=optimizer, state={"slow": self},
            kind="consecutive", on_event=self._keep, settings=Settings(low_priority=False), clock=lambda: self.now,
        ) as checkpointer:  # fmt: skip
            for step in (7, 8):
                optimizer.zero_grad()
                model(torch.arange(CHANGED)[None]).sum().backward()
                optimizer.step()
                before = self.writes
                checkpointer.save_checkpoint(step, epoch=3).wait()
                self.writes_of[step] = self.writes - before

    def _keep(self, event: Any) -> None:
        if isinstance(event, SaveEvent):
            self.events.append(event)

    def _write(self, op: Op, perform: Perform) -> Any:
        if op.kind in WRITES:
            self.now += WRITE_SECONDS
            self.writes += 1
        return perform(op)

    def state_dict(self) -> dict[str, Any]:
        self.now += STATE_SECONDS
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("nothing is resumed")


def bytes_under(store_name: str, seq: int) -> int:
    return sum(stored.size for stored in MemoryStore(store_name).list(f"data/{seq:08}-"))


def test_an_event_tells_what_the_store_holds_and_the_clock_says(store_name: str) -> None:
    watched = Watched(store_name)
    infos = Repository(MemoryStore(store_name)).checkpoints()
    assert len(watched.events) == len(infos) == 2
    for event, info in zip(watched.events, infos, strict=True):
        for fact in ("seq", "step", "epoch", "kind", "rows", "table_rows", "bytes"):
            assert getattr(event, fact) == getattr(info, fact), fact
        assert event.bytes == bytes_under(store_name, event.seq)
        assert event.stall_seconds == STATE_SECONDS
        assert event.persist_seconds == WRITE_SECONDS * watched.writes_of[event.step] > 0
    assert [(e.kind, e.rows, e.share, e.chain_length) for e in watched.events] == [
        ("base", ROWS, 1.0, 1), ("delta", CHANGED, CHANGED / ROWS, 2)
    ]  # fmt: skip


def test_the_line_in_the_log_is_the_event_in_words(store_name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "incremental_ckpt"):
        watched = Watched(store_name)
    base, delta = watched.events
    assert [line for line in caplog.messages if line.startswith("saved")] == [
        f"saved step 7 as seq 1: base, 40 of 40 rows (100.00 %), {base.bytes / 1e3:.1f} kB, stall 2000.0 ms, durable "
        f"after {base.persist_seconds:.2f} s, chain of 1",
        f"saved step 8 as seq 2: delta, 10 of 40 rows (25.00 %), {delta.bytes / 1e3:.1f} kB, stall 2000.0 ms, durable "
        f"after {delta.persist_seconds:.2f} s, chain of 2",
    ]
