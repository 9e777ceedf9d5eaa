"""A training run that dies and starts again: a script of steps and saves, and the lives that carry it out.

It must not know how anything is stored; it compares what comes back with a run that nobody interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, CheckpointError, SaveError, SaveHandle, Settings
from incremental_ckpt.format import layout
from incremental_ckpt.storage import MemoryStore, Store
from incremental_ckpt.testing import Crash, CrashStore

TINY = Settings(pack_bytes=2500, entry_bytes=1024, preimage_bytes=2000, low_priority=False, read_threads=1)


@dataclass(frozen=True)
class Script:
    """What a run does, step by step.

    Attributes:
        saves: after which steps it saves, and which kind.
        waits: after which of these saves it waits until the checkpoint is durable; the others go on in the background.
        make: the run of a layout and a seed.
    """

    layout: str
    steps: int
    saves: Mapping[int, str]
    waits: frozenset[int]
    settings: Settings = TINY
    make: Callable[[str, int], Run] = Run


@dataclass
class Life:
    """What one process achieved.

    Attributes:
        resumed: the step.
        acknowledged: the steps of saves that it was told are durable.
        failed: the steps of saves that it was told have failed, while it lived.
        state: at the end of the script.
    """

    resumed: int | None = None
    acknowledged: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    state: Mapping[str, Any] | None = None


def live(script: Script, store: Store, truth: Sequence[Mapping[str, Any]], seed: int) -> Life:
    """One process: resume what the store holds, compare it, go on to the end of the script or to a Crash."""
    life = Life()
    # Where something is stored, all that a life has must come from there; where nothing is, it starts as the truth did.
    begins = not any(store.list(layout.MANIFESTS))
    run = script.make(script.layout, 0 if begins else seed)
    checkpointer: Checkpointer | None = None
    in_flight: list[SaveHandle] = []
    try:
        checkpointer = Checkpointer(run.model, store, **run.arguments, settings=script.settings)
        progress = checkpointer.resume_from_checkpoint()
        assert (progress is None) == begins, "the run began anew beside its checkpoints"
        if progress is not None:
            life.resumed = run.steps_done = progress.step
            assert_same(run.copy(), truth[progress.step])
        while run.steps_done < script.steps:
            run.train()
            if run.steps_done in script.saves:
                _save(checkpointer, run.steps_done, script, in_flight)
        with _outlived():
            checkpointer.close()
        life.state = run.copy()
    except Crash:
        pass
    except CheckpointError as error:
        assert isinstance(error.__cause__, Crash), error
    finally:
        if checkpointer is not None:
            with suppress(Crash, CheckpointError):
                checkpointer.close()
        done = [handle for handle in in_flight if handle.done()]
        life.acknowledged = [h.step for h in done if h._error is None]
        life.failed = [h.step for h in done if h._error is not None and not isinstance(h._error.__cause__, Crash)]
    return life


def _save(checkpointer: Checkpointer, step: int, script: Script, in_flight: list[SaveHandle]) -> None:
    """Made again where it is told of a failure: its own, or that of the save before it."""
    for _ in range(3):
        with _outlived():
            in_flight.append(checkpointer.save_checkpoint(step, kind=script.saves[step]))  # type: ignore[arg-type]
            if step in script.waits:
                in_flight[-1].wait()
            return
    raise AssertionError(f"the save of step {step} fails and fails")


@contextmanager
def _outlived() -> Iterator[None]:
    """Failed saves of a process that is alive."""
    try:
        yield
    except SaveError as error:
        if isinstance(error.__cause__, Crash):
            raise


def copy_of(store: MemoryStore) -> MemoryStore:
    twin = MemoryStore()
    for one in store.list():
        twin.put(one.key, [bytes(store.get(one.key))])
    return twin


def writes_of(script: Script, store: Store, truth: Sequence[Mapping[str, Any]]) -> int:
    """How many writes an undisturbed life makes."""
    alive = CrashStore(store)
    life = live(script, alive, truth, seed=0)
    assert life.state is not None
    assert_same(life.state, truth[script.steps])
    return alive.writes
