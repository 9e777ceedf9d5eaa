"""Events as TensorBoard scalars, by a writer of the caller's and by one of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_runs import Run

from incremental_ckpt import Checkpointer, EverySteps
from incremental_ckpt.events import (
    CompactEvent,
    FailureEvent,
    IntervalEvent,
    PruneEvent,
    ResumeEvent,
    SaveEvent,
    SkipEvent,
)
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.tensorboard import TensorBoardWriter

EVENTS = [
    ResumeEvent(4, 40, 2, 1000, 0.5, ((5, "damaged"),)),
    SaveEvent(5, 50, 1, "delta", 25, 100, 2000, 0.01, 0.3, 3, deferred_steps=2, waited_seconds=0.25, skipped=1),
    SkipEvent(60, 2),
    FailureEvent(70, 6, OSError("full")),
    IntervalEvent(50, 14, "budget", 0.07, 0.01, 0.3, 0.02, 0.0005),
    PruneEvent(50, (1, 2, 3), 4000, ("seq 4 is not deleted",)),
    CompactEvent(50, 4, 20, 9000, 1.5),
    CompactEvent(80, 7, 21, 0, 0.5, "the disk is full"),
]


class Recorder:
    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value


def test_every_number_of_every_event_is_a_scalar_at_its_step() -> None:
    recorder = Recorder()
    writer = TensorBoardWriter(recorder, prefix="ckpt")
    for event in EVENTS:
        writer(event)
    expected = {
        ("ckpt/resume/seq", 40): 4, ("ckpt/resume/chain_length", 40): 2, ("ckpt/resume/bytes", 40): 1000,
        ("ckpt/resume/seconds", 40): 0.5, ("ckpt/resume/passed_over", 40): 1,
        ("ckpt/save/seq", 50): 5, ("ckpt/save/rows", 50): 25, ("ckpt/save/table_rows", 50): 100,
        ("ckpt/save/bytes", 50): 2000, ("ckpt/save/stall_seconds", 50): 0.01, ("ckpt/save/persist_seconds", 50): 0.3,
        ("ckpt/save/chain_length", 50): 3, ("ckpt/save/deferred_steps", 50): 2, ("ckpt/save/share", 50): 0.25,
        ("ckpt/save/waited_seconds", 50): 0.25, ("ckpt/save/skipped", 50): 1, ("ckpt/save/base", 50): 0.0,
        ("ckpt/skip/skipped", 60): 2, ("ckpt/failure/seq", 70): 6,
        ("ckpt/interval/interval_steps", 50): 14, ("ckpt/interval/step_seconds", 50): 0.07,
        ("ckpt/interval/stall_seconds", 50): 0.01, ("ckpt/interval/persist_seconds", 50): 0.3,
        ("ckpt/interval/slowdown_seconds", 50): 0.02, ("ckpt/interval/tracking_seconds", 50): 0.0005,
        ("ckpt/prune/forgotten", 50): 3, ("ckpt/prune/bytes_freed", 50): 4000, ("ckpt/prune/failures", 50): 1,
        ("ckpt/compact/seq", 50): 4, ("ckpt/compact/chain_length", 50): 20, ("ckpt/compact/bytes", 50): 9000,
        ("ckpt/compact/seconds", 50): 1.5, ("ckpt/compact/failed", 50): 0.0,
        ("ckpt/compact/seq", 80): 7, ("ckpt/compact/chain_length", 80): 21, ("ckpt/compact/bytes", 80): 0,
        ("ckpt/compact/seconds", 80): 0.5, ("ckpt/compact/failed", 80): 1.0,
    }  # fmt: skip
    assert recorder.scalars == expected


def test_a_run_can_be_read_back_with_tensorboard(tmp_path: Path, store_name: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run()
    writer = TensorBoardWriter(tmp_path / "board")
    events: list[Any] = []

    def tell(event: Any) -> None:
        events.append(event)
        writer(event)

    with Checkpointer(
        run.model, MemoryStore(store_name), **run.arguments, when=EverySteps(2), busy="wait", on_event=tell
    ) as checkpointer:
        for step in range(1, 7):
            run.train()
            checkpointer.step(step)
    writer.close()
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    read = [(e.step, e.value) for e in board.Scalars("incremental_ckpt/save/bytes")]
    assert read == [(e.step, float(e.bytes)) for e in events if isinstance(e, SaveEvent)]
    assert [step for step, _ in read] == [2, 4, 6]
