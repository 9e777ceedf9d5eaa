"""SIGTERM: the process ends with a committed checkpoint of its last step, on one rank and on several."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from incremental_ckpt import Checkpointer, EverySteps, Repository, SaveError, Settings, open_store
from incremental_ckpt.preemption import EXIT_CODE, Preemption
from incremental_ckpt.storage import LocalStore
from incremental_ckpt.testing import FaultStore, Stall, on

GRACE = 60.0
TIMEOUT = 120.0


class Loop:
    """A model that is trained; ``at`` is called in the middle of each step."""

    def __init__(self, path: Path, at: Callable[[int], None], **arguments: Any) -> None:
        self.model: torch.nn.Module = torch.nn.EmbeddingBag(50, 4, mode="sum", sparse=True)
        if torch.distributed.is_initialized():
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.store = FaultStore(LocalStore(str(path)))
        self.at = at
        settings = Settings(grace_seconds=arguments.pop("grace", GRACE), low_priority=False)
        self.checkpointer = Checkpointer(
            self.model, self.store, optimizer=self.optimizer, settings=settings, **arguments
        )  # fmt: skip

    def train(self, steps: int) -> None:
        with self.checkpointer:
            for step in range(1, steps + 1):
                self.at(step)
                self.optimizer.zero_grad()
                self.model(torch.arange(step % 40, step % 40 + 5).reshape(1, -1)).sum().backward()
                self.optimizer.step()
                self.checkpointer.step(step)


def terminate_at(last: int) -> Callable[[int], None]:
    return lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == last else None


def life(script: Callable[..., None], path: Path, *more: Any) -> None:
    with (path.parent / f"{path.name}.{os.getpid()}.err").open("w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    script(path, *more)


def told(path: Path) -> list[str]:
    lines = "".join(p.read_text() for p in path.parent.glob(f"{path.name}.*.err")).splitlines()
    return [line[line.index("SIGTERM: ") :] for line in lines if "SIGTERM: " in line]


def run(forks: ForkServerContext, script: Callable[..., None], path: Path, *more: Any) -> int:
    process = forks.Process(target=life, args=(script, path, *more))
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode is not None, [p.read_text() for p in path.parent.glob("*.err")]
    return process.exitcode


def steps_in(path: Path) -> list[int]:
    return [i.step for i in Repository(open_store(path)).checkpoints()]


def ends_in_the_middle(path: Path) -> None:
    Loop(path, terminate_at(7), when=EverySteps(5)).train(100)


def test_the_last_step_is_saved_and_the_process_ends(forks: ForkServerContext, tmp_path: Path) -> None:
    assert run(forks, ends_in_the_middle, tmp_path / "store") == EXIT_CODE == 143
    assert steps_in(tmp_path / "store") == [5, 7]
    assert sorted(told(tmp_path / "store")) == [
        "SIGTERM: saving step 7, the last save before the process ends",
        "SIGTERM: step 7 is saved as seq 2, and the process ends",
        "SIGTERM: the next step() saves, then the process ends; without one it ends in 60 s (Settings.grace_seconds)",
    ]


def ends_while_a_save_is_slow(path: Path) -> None:
    loop = Loop(path, lambda step: None, when=EverySteps(5))
    stall = loop.store.inject(Stall(on("put", "data/00000001*", at=1)))

    def at(step: int) -> None:
        if step == 7:
            threading.Timer(0.2, stall.release).start()
            os.kill(os.getpid(), signal.SIGTERM)

    loop.at = at
    loop.train(100)


def test_a_save_that_is_in_flight_becomes_durable_first(forks: ForkServerContext, tmp_path: Path) -> None:
    assert run(forks, ends_while_a_save_is_slow, tmp_path / "store") == EXIT_CODE
    assert steps_in(tmp_path / "store") == [5, 7]


def calls_save_checkpoint_only(path: Path) -> None:
    loop = Loop(path, lambda step: None)
    with loop.checkpointer as checkpointer:
        checkpointer.step(1)
        os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.save_checkpoint(2)


def test_a_save_that_the_loop_asks_for_is_the_last_one_just_as_well(forks: ForkServerContext, tmp_path: Path) -> None:
    assert run(forks, calls_save_checkpoint_only, tmp_path / "store") == EXIT_CODE
    assert steps_in(tmp_path / "store") == [2]


def has_a_handler_of_its_own(path: Path) -> None:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    loop = Loop(path, terminate_at(3))
    loop.train(5)
    assert told == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    sys.exit(9)


def test_a_handler_that_was_there_before_is_called_after_the_save(forks: ForkServerContext, tmp_path: Path) -> None:
    assert run(forks, has_a_handler_of_its_own, tmp_path / "store") == 9
    assert steps_in(tmp_path / "store") == [3]


def is_stuck(path: Path) -> None:
    def at(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(TIMEOUT)

    loop = Loop(path, at, grace=0.2)
    loop.checkpointer.save_checkpoint(1).wait()
    loop.train(5)


def is_stuck_from_the_start(path: Path) -> None:
    Loop(path, lambda step: None, grace=0.2).checkpointer.step(1)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(TIMEOUT)


def test_a_run_that_has_saved_nothing_says_so_when_it_ends(forks: ForkServerContext, tmp_path: Path) -> None:
    assert run(forks, is_stuck_from_the_start, tmp_path / "store") == -signal.SIGTERM
    assert told(tmp_path / "store")[-1].endswith("; nothing is saved since this process began")


def test_a_loop_that_does_not_come_by_ends_with_the_grace_period(forks: ForkServerContext, tmp_path: Path) -> None:
    assert run(forks, is_stuck, tmp_path / "store") == -signal.SIGTERM
    *_, last = told(tmp_path / "store")
    assert last == "SIGTERM: the grace period of 0.2 s is over and the process ends; nothing is saved since step 1"


def is_stuck_in_its_log(path: Path) -> None:
    class Blocked(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            threading.Event().wait(TIMEOUT)

    logging.getLogger("incremental_ckpt").addHandler(Blocked())
    is_stuck(path)


def test_a_log_that_blocks_does_not_outlive_the_grace_period(forks: ForkServerContext, tmp_path: Path) -> None:
    assert run(forks, is_stuck_in_its_log, tmp_path / "store") == -signal.SIGTERM


def is_told_twice(path: Path) -> None:
    def at(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    Loop(path, at).train(5)


def test_a_second_signal_ends_the_process_at_once(forks: ForkServerContext, tmp_path: Path) -> None:
    assert run(forks, is_told_twice, tmp_path / "store") == -signal.SIGTERM
    assert not (tmp_path / "store" / "manifests").exists()


def does_not_want_it(path: Path) -> None:
    Loop(path, terminate_at(3), grace=0.0).train(5)


def test_without_a_grace_period_the_signal_is_left_alone(forks: ForkServerContext, tmp_path: Path) -> None:
    assert run(forks, does_not_want_it, tmp_path / "store") == -signal.SIGTERM


def ends_after_the_last_step(path: Path) -> None:
    loop = Loop(path, lambda step: None, when=EverySteps(2))
    with loop.checkpointer as checkpointer:
        for step in (1, 2):
            checkpointer.step(step)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(TIMEOUT)  # an evaluation that would take too long


def test_a_signal_that_comes_too_late_for_a_save_is_not_lost(forks: ForkServerContext, tmp_path: Path) -> None:
    assert run(forks, ends_after_the_last_step, tmp_path / "store") == -signal.SIGTERM
    assert steps_in(tmp_path / "store") == [2]


def wait_for_ever(ready: Connection) -> None:
    ready.send(None)
    time.sleep(TIMEOUT)


def forks_a_worker(path: Path) -> None:
    def at(step: int) -> None:
        if step == 2:  # listening has begun with the first step
            here, there = multiprocessing.Pipe()
            worker = multiprocessing.get_context("fork").Process(target=wait_for_ever, args=(there,))
            worker.start()
            here.recv()
            worker.terminate()
            worker.join(TIMEOUT)
            assert worker.exitcode == -signal.SIGTERM

    Loop(path, at, grace=10 * TIMEOUT).train(2)


def test_forked_workers_die_of_the_signal(forks: ForkServerContext, tmp_path: Path) -> None:
    assert run(forks, forks_a_worker, tmp_path / "store") == 0


def is_one_of_two(path: Path, rank: int, told: int) -> None:
    import torch.distributed as dist

    meeting_place = dist.FileStore(str(path.parent / "rendezvous"), 2)
    dist.init_process_group("gloo", store=meeting_place, rank=rank, world_size=2)
    at = terminate_at(7) if rank == told else lambda step: None
    try:
        Loop(path, at, when=EverySteps(100_000)).train(99_999)
    except BaseException:
        traceback.print_exc()
        raise


@pytest.mark.parametrize("told", [0, 1])
def test_of_two_ranks_one_is_told_and_both_save_the_same_step(
    forks: ForkServerContext, tmp_path: Path, told: int
) -> None:
    path = tmp_path / "store"
    processes = [forks.Process(target=life, args=(is_one_of_two, path, rank, told)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
    assert [p.exitcode for p in processes] == [EXIT_CODE] * 2, [p.read_text() for p in tmp_path.glob("*.err")]
    (last,) = steps_in(path)
    assert 7 <= last < 99_999  # at the next meeting, or the one after


class TestInThisProcess:
    @pytest.fixture
    def default(self) -> Iterator[None]:
        before = signal.getsignal(signal.SIGTERM)
        yield
        signal.signal(signal.SIGTERM, before)

    def test_listening_ends_with_the_checkpointer(self, default: None, tmp_path: Path) -> None:
        before = signal.getsignal(signal.SIGTERM)
        Loop(tmp_path / "store", lambda step: None).train(2)
        assert signal.getsignal(signal.SIGTERM) is before

    def test_a_last_save_that_is_not_durable_in_time_is_an_error(self, default: None, tmp_path: Path) -> None:
        loop = Loop(tmp_path / "store", terminate_at(2), grace=0.4)
        stall = loop.store.inject(Stall(on("put", "data/*", at=1)))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(SaveError, match="grace period"), loop.checkpointer as checkpointer:
            checkpointer.step(1)
            signal.signal(signal.SIGTERM, checkpointer._preemption._take)
            checkpointer._preemption._before = lambda number, frame: stall.release()  # at the end of the grace
            os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.step(2)

    def test_other_threads_do_not_listen(self, default: None) -> None:
        before = signal.getsignal(signal.SIGTERM)
        thread = threading.Thread(target=Preemption(GRACE).listen)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is before

    def test_a_signal_that_is_ignored_stays_ignored(self, default: None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Preemption(GRACE).listen()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
