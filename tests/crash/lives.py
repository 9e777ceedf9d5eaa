"""A training run that dies and starts again: a script of steps and saves, and the lives that carry it out.

It must not know how anything is stored; it compares what comes back with a run that nobody interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, CheckpointError, SaveHandle, Settings
from incremental_ckpt.storage import MemoryStore, Store
from incremental_ckpt.testing import Crash, CrashStore

TINY = Settings(pack_bytes=2500, entry_bytes=1024, preimage_bytes=2000, low_priority=False, read_threads=1)


@dataclass(frozen=True)
class Script:
    """What a run does, step by step.

    Attributes:
        saves: after which steps it saves, and which kind.
        waits: after which of these saves it waits until the checkpoint is durable; the others go on in the background.
    """

    layout: str
    steps: int
    saves: Mapping[int, str]
    waits: frozenset[int]
    settings: Settings = TINY


@dataclass
class Life:
    """What one process achieved: the steps of saves that were acknowledged, and where it resumed."""

    resumed: int | None = None
    acknowledged: list[int] = field(default_factory=list)
    state: Mapping[str, Any] | None = None


def live(script: Script, store: Store, truth: Sequence[Mapping[str, Any]], seed: int) -> Life:
    """One process: resume what the store holds, compare it, go on to the end of the script or to a Crash."""
    life = Life()
    run = Run(script.layout, seed)
    checkpointer: Checkpointer | None = None
    in_flight: list[SaveHandle] = []
    try:
        checkpointer = Checkpointer(run.model, store, **run.arguments, settings=script.settings)
        progress = checkpointer.resume_from_checkpoint()
        if progress is None:
            run = _fresh(checkpointer, run, script)
            checkpointer = Checkpointer(run.model, store, **run.arguments, settings=script.settings)
        else:
            life.resumed = run.steps_done = progress.step
            assert_same(run.copy(), truth[progress.step])
        while run.steps_done < script.steps:
            run.train()
            step = run.steps_done
            if step in script.saves:
                in_flight.append(checkpointer.save_checkpoint(step, kind=script.saves[step]))  # type: ignore[arg-type]
                if step in script.waits:
                    in_flight[-1].wait()
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
        life.acknowledged = [h.step for h in in_flight if h.done() and h._error is None]
    return life


def _fresh(checkpointer: Checkpointer, run: Run, script: Script) -> Run:
    """An empty store: the run starts from its own seed, as the truth did."""
    checkpointer.close()
    del run
    return Run(script.layout)


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
