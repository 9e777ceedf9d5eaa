"""``Settings.compact_after``: the chain gets an equivalent base beside the run, in a process that never outlives it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, EverySteps, KeepLast, Repository, Settings, open_store
from incremental_ckpt.events import CompactEvent, SaveEvent
from incremental_ckpt.storage import MemoryStore

SETTINGS = Settings(low_priority=False, compact_after=2)
SLEEPER = (sys.executable, "-c", "import sys, time; print('begun', flush=True); time.sleep(600)")


class Life:
    """A run that saves each step into a folder; after each save the compaction that it began is waited for."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self.run, self.events = Run(), list[Any]()
        self.checkpointer = Checkpointer(
            self.run.model, folder, **self.run.arguments, when=EverySteps(1), kind="consecutive", busy="wait",
            on_event=self.events.append, settings=SETTINGS, **arguments,
        )  # fmt: skip
        found = self.checkpointer._compactions
        assert found is not None
        self.compactions = found

    def save(self, step: int, *, waits: bool = True) -> None:
        self.run.train()
        self.checkpointer.save_checkpoint(step).wait()
        self.checkpointer._saver._background._worker.stop()  # what follows a commit is done as well
        if waits and self.compactions._running is not None:
            self.compactions._running.process.wait(60)

    @property
    def compacted(self) -> list[CompactEvent]:
        return [event for event in self.events if isinstance(event, CompactEvent)]


def chain_of(folder: Path, seq: int) -> list[int]:
    return [link.manifest.seq for link in Repository(open_store(folder)).links(seq)]


def test_a_chain_with_enough_deltas_gets_an_equivalent_base_and_a_resume_reads_it(tmp_path: Path) -> None:
    life = Life(tmp_path)
    with life.checkpointer:
        for step in range(1, 5):
            life.save(step)
        expected = life.run.copy()
    (event,) = life.compacted
    assert (event.step, event.seq, event.chain_length, event.failure) == (3, 3, 3, "")
    assert event.bytes > 0
    assert event.seconds > 0
    assert chain_of(tmp_path, 4) == [3, 4]
    resumed = Run(seed=9)
    with Checkpointer(resumed.model, tmp_path, **resumed.arguments) as checkpointer:
        checkpointer.resume_from_checkpoint()
        assert_same(resumed.copy(), expected)
    assert Repository(open_store(tmp_path)).check(deep=True).problems == ()


def test_it_goes_on_every_so_many_deltas_and_the_chain_behind_it_can_be_pruned(tmp_path: Path) -> None:
    life = Life(tmp_path, keep=KeepLast(1))
    with life.checkpointer:
        for step in range(1, 8):
            life.save(step)
    assert [event.seq for event in life.compacted] == [3, 5, 7]
    assert [info.seq for info in Repository(open_store(tmp_path)).checkpoints()] == [5, 6, 7]
    assert chain_of(tmp_path, 7) == [7]


def test_one_that_fails_is_told_and_made_up_for_later_and_fails_no_save(tmp_path: Path) -> None:
    life = Life(tmp_path)
    with life.checkpointer:
        life.save(1)
        pack = min(tmp_path.glob("data/00000001-*/*.safetensors"))
        whole = pack.read_bytes()
        pack.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        for step in (2, 3, 4):
            life.save(step)
        pack.write_bytes(whole)
        for step in (5, 6, 7):
            life.save(step)
    failed, later = life.compacted
    assert failed.seq == 3
    assert pack.name in failed.failure
    assert (later.seq, later.chain_length, later.failure) == (6, 6, "")
    assert [e.seq for e in life.events if isinstance(e, SaveEvent)] == [*range(1, 8)]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ((sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), "ended by signal 9"),
        ((sys.executable, "-c", "raise SystemExit(3)"), "ended with 3"),
        (("/nowhere/python",), "/nowhere/python"),
    ],
)
def test_a_process_that_dies_or_does_not_begin_is_a_failure_of_the_compaction_alone(
    command: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    life = Life(tmp_path)
    life.compactions._command = command
    with life.checkpointer:
        for step in range(1, 5):
            life.save(step)
    (event,) = life.compacted
    assert reason in event.failure


def test_no_save_waits_for_it_and_close_leaves_no_process_behind(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.compactions._command = SLEEPER
    with life.checkpointer:
        for step in range(1, 6):
            life.save(step, waits=False)
        assert life.compactions._running is not None
        process = life.compactions._running.process
        assert life.compactions._running.seq == 3, "one at a time"
        assert process.poll() is None
    assert process.returncode == -signal.SIGTERM
    assert life.compacted == []


def test_the_process_runs_at_the_lowest_priority(tmp_path: Path) -> None:
    life = Life(tmp_path)
    with life.checkpointer:
        for step in (1, 2):
            life.save(step)
    script = "import os, sys; from incremental_ckpt.compaction.__main__ import main; main(sys.argv[1:]); "
    script += "print(os.getpriority(os.PRIO_PROCESS, 0), file=sys.stderr)"
    command = [sys.executable, "-c", script, str(tmp_path), "2", str(64 << 20), str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "19"
    assert chain_of(tmp_path, 2) == [2]


DYING_RUN = """
import os, signal, subprocess, sys
child = (
    "import sys, time; from incremental_ckpt.compaction.__main__ import end_with; end_with(int(sys.argv[1])); "
    "print('begun', flush=True); time.sleep(600)"
)
process = subprocess.Popen(
    [sys.executable, "-c", child, str(os.getpid())],
    stdout=subprocess.PIPE, start_new_session=True, pass_fds=[int(sys.argv[1])],
)
assert process.stdout.readline() == b"begun\\n"
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_when_the_run_is_killed() -> None:
    alive, held = os.pipe()
    done = subprocess.run([sys.executable, "-c", DYING_RUN, str(held)], pass_fds=[held], timeout=60)
    os.close(held)
    assert done.returncode == -signal.SIGKILL
    assert select.select([alive], [], [], 60)[0], "the process that held the other end is still there"
    assert os.read(alive, 1) == b""
    os.close(alive)


def test_a_store_that_no_other_process_can_open_is_refused(store_name: str) -> None:
    for store in (MemoryStore(store_name), f"memory://{store_name}"):
        with pytest.raises(ValueError, match="another process can open"):
            Checkpointer(Run().model, store, settings=SETTINGS)
    with pytest.raises(ValueError, match="compact_after"):
        Settings(compact_after=0)


def test_without_the_setting_nothing_is_compacted(tmp_path: Path) -> None:
    run = Run()
    with Checkpointer(run.model, tmp_path, **run.arguments, kind="consecutive", settings=Settings()) as checkpointer:
        for step in range(1, 6):
            run.train()
            checkpointer.save_checkpoint(step).wait()
    assert not [*tmp_path.glob("manifests/*.base.json")]
