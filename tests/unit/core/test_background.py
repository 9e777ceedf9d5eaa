"""The background's thread: in which order it works, and that it leaves the cores to training."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from incremental_ckpt.background import Worker


def test_jobs_are_carried_out_in_their_order_and_all_of_them_before_it_stops() -> None:
    worker = Worker(low_priority=False)
    done: list[int] = []
    for number in range(50):
        worker.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    worker.stop()
    assert done == list(range(50))


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no priorities of threads")
def test_at_low_priority_it_is_the_last_in_line_but_gets_its_turn(low: bool) -> None:
    worker = Worker(low_priority=low)
    found: list[int] = []

    def look() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    training = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    worker.submit(look)
    worker.stop()
    assert found == [19 if low else training]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == training, "training's own is as before"
