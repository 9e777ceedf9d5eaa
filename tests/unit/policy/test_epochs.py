"""EveryEpoch without epochs: told, not silent."""

from __future__ import annotations

import logging

import pytest
from small_runs import Run

from incremental_ckpt import Checkpointer, EveryEpoch, EverySteps
from incremental_ckpt.storage import MemoryStore

TOLD = "step() was given none: step(..., epoch=epoch)"


def test_steps_without_an_epoch_are_refused_where_nothing_else_saves(store_name: str) -> None:
    run = Run()
    with Checkpointer(run.model, MemoryStore(store_name), **run.arguments, when=EveryEpoch()) as checkpointer:
        with pytest.raises(ValueError, match=r"step\(\.\.\., epoch=epoch\)"):
            checkpointer.step(1)
        assert checkpointer.step(1, epoch=0) is None
        assert checkpointer.step(2, epoch=1) is not None


def test_steps_without_an_epoch_are_warned_of_once_where_something_else_saves(
    store_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    when = [EverySteps(2), EveryEpoch()]
    with (
        caplog.at_level(logging.WARNING, "incremental_ckpt"),
        Checkpointer(run.model, MemoryStore(store_name), **run.arguments, when=when) as checkpointer,
    ):
        assert [checkpointer.step(step) is not None for step in range(1, 4)] == [False, True, False]
    assert [message for message in caplog.messages if message.endswith(TOLD)] == caplog.messages[:1]
