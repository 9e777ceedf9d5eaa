"""A save that is due while the last is not durable: deferred, waited for or skipped, counted, and told in events."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from small_runs import Run

from incremental_ckpt import Checkpointer, EverySteps, SaveEvent, SaveHandle, Settings, SkipEvent
from incremental_ckpt.flight import Late
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore, Stall, on


def saves_of(events: list[Any]) -> list[SaveEvent]:
    return [e for e in events if isinstance(e, SaveEvent)]


def train(store_name: str, busy: Any, release_after: int) -> list[Any]:
    """Ten steps, saves due at each second; that of step 2 is durable only after step ``release_after``."""
    run, events = Run(), list[Any]()
    first: SaveHandle | None = None
    store = FaultStore(MemoryStore(store_name))
    stall = store.inject(Stall(on("put", "data/00000001*", at=1)))
    with Checkpointer(
        run.model, store, **run.arguments, when=EverySteps(2), busy=busy, on_event=events.append,
        settings=Settings(low_priority=False),
    ) as checkpointer:  # fmt: skip
        for step in range(1, 11):
            run.train()
            handle = checkpointer.step(step)
            if step == 2:
                first = handle
            if step == release_after:
                stall.release()
                assert first is not None
                first.wait()
            elif step > release_after and handle is not None:
                handle.wait()
    return events


def test_a_deferred_save_says_how_many_steps_late_it_is(store_name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "incremental_ckpt"):
        saves = saves_of(train(store_name, "defer", 6))
    assert [(e.step, e.deferred_steps) for e in saves] == [(2, 0), (7, 3), (8, 0), (10, 0)]
    assert [r for r in caplog.messages if "saved step 7" in r and "deferred by 3 steps" in r]
    assert not [r for r in caplog.messages if "saved step 8" in r and "deferred" in r]


def test_lateness_is_told_of_one_step_and_of_several() -> None:
    assert [str(Late(steps)) for steps in (0, 1, 2)] == ["", "deferred by 1 step", "deferred by 2 steps"]


@pytest.mark.parametrize(("busy", "why"), [("defer", "was put off"), ("skip", "was skipped")])
def test_a_save_that_is_left_out_at_the_end_is_told(
    busy: Any, why: str, store_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    store = FaultStore(MemoryStore(store_name))
    stall = store.inject(Stall(on("put", "data/00000001*", at=1)))
    with Checkpointer(
        run.model, store, **run.arguments, when=EverySteps(2), busy=busy, settings=Settings(low_priority=False)
    ) as checkpointer:
        for step in range(1, 6):
            run.train()
            checkpointer.step(step)
        assert stall.reached.wait(60)
        threading.Timer(0.1, stall.release).start()
    told = f"a save was due at step 4, {why}"
    assert [r for r in caplog.messages if told in r and "save_checkpoint(step)" in r]
    caplog.clear()
    train(f"{store_name}-made", busy, 6)
    assert not [r for r in caplog.messages if "a save was due" in r]


def test_skipped_saves_are_counted_until_the_next_one(store_name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "incremental_ckpt"):
        events = train(store_name, "skip", 6)
    assert [r for r in caplog.messages if "skipped, since" in r] == [
        "the save of step 4 is skipped, since the one before is not durable yet (1 in a row)",
        "the save of step 6 is skipped, since the one before is not durable yet (2 in a row)",
    ]
    assert [(e.step, e.skipped) for e in events if isinstance(e, SkipEvent)] == [(4, 1), (6, 2)]
    assert [(e.step, e.skipped) for e in saves_of(events)] == [(2, 0), (8, 2), (10, 0)]


def test_a_wait_is_told_in_seconds(store_name: str) -> None:
    run, events = Run(), list[Any]()
    store = FaultStore(MemoryStore(store_name))
    stall = store.inject(Stall(on("put", "data/00000001*", at=1)))
    with Checkpointer(
        run.model, store, **run.arguments, when=EverySteps(1), busy="wait", on_event=events.append,
        settings=Settings(low_priority=False),
    ) as checkpointer:  # fmt: skip
        checkpointer.step(1)
        assert stall.reached.wait(60)
        threading.Timer(0.1, stall.release).start()
        checkpointer.step(2)
    first, second = saves_of(events)
    assert first.waited_seconds == 0.0
    assert second.waited_seconds > 0.0
