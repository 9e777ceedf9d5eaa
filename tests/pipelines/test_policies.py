"""With every policy, whatever fails and whenever it is killed: each checkpoint is the run's state at its step."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
from policy_mixtures import MIXTURES, POLICIES
from small_runs import Run, assert_same, truth

from incremental_ckpt import Checkpointer, CheckpointError, Repository, SaveError, Settings
from incremental_ckpt.policy import BusyPolicy, KindPolicy
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import Crash, CrashStore, FaultStore, Op, Perform, fail, on
from incremental_ckpt.testing.stores import WRITES

STEPS, EPOCH, STEP_SECONDS = 90, 7, 0.1
SETTINGS = Settings(pack_bytes=4000, entry_bytes=256, preimage_bytes=1500, chain_length=6, low_priority=False)
PATTERNS = ("data/*-0000.safetensors", "data/*/rank-00000.json", "manifests/*")

LAYOUTS = ("adagrad", "sparse_adam", "sgd", "adagrad", "dense_gradients", "sparse_adam", "adagrad")
OF_LAYOUTS = [(*mixture, layout) for mixture, layout in zip(MIXTURES, LAYOUTS, strict=True)]


@pytest.fixture(scope="module")
def truths() -> dict[str, list[dict[str, Any]]]:
    return {layout: truth(layout, STEPS) for layout in {*LAYOUTS}}


class Lives:
    """One store, and a run that is killed and resumed until it is done. Writes take time by its clock."""

    def __init__(self, when: Any, kind: KindPolicy, busy: BusyPolicy, layout: str, name: str) -> None:
        self.arguments = {"when": when, "kind": kind, "busy": busy}
        self.layout = layout
        self.repository = Repository(MemoryStore(name))
        self.name = name
        self.choices = random.Random(f"{when}{kind}{busy}{layout}")
        self.clock = 0.0
        self.failures = self.crashes = self.resumes = 0

    def live(self, states: list[dict[str, Any]], *, until: int) -> None:
        """Until a step, or killed at a write before."""
        last = until == STEPS
        crashing = CrashStore(
            MemoryStore(self.name), 0 if last else self.choices.randint(12, 40), landed=self.choices.random() < 0.5
        )
        store = FaultStore(crashing, self.take_time)
        if last:
            store.inject(fail(on(WRITES, PATTERNS[1], at=1)))
        self.run = Run(self.layout, seed=5 if self.repository.checkpoints() else 0)
        checkpointer = Checkpointer(
            self.run.model, store, **self.run.arguments, **self.arguments, settings=SETTINGS, clock=lambda: self.clock
        )
        with suppress(Crash):
            progress = checkpointer.resume_from_checkpoint()
            self.resumes += progress is not None
            for step in range(progress.step + 1 if progress else 1, STEPS + 1):
                if step % 9 == 0 or (progress is not None and step == progress.step + 1):
                    assert_same(self.run.copy(), states[step - 1])
                self.run.train()
                self.clock += STEP_SECONDS
                crashing.crashed |= step == until and not last
                if crashing.crashed:
                    break
                if self.choices.random() < 0.06:
                    where = on(WRITES, self.choices.choice(PATTERNS), at=1)
                    store.inject(fail(where, landed=self.choices.random() < 0.3))
                try:
                    checkpointer.step(step, epoch=step // EPOCH)
                except SaveError:
                    self.failures += 1
                    store.heal()
                    store.inject(self.take_time)
        self.crashes += crashing.crashed
        with suppress(CheckpointError, Crash):
            checkpointer.close()

    def take_time(self, op: Op, perform: Perform) -> Any:
        if op.kind in WRITES:
            self.clock += 0.04
        return perform(op)


@pytest.mark.parametrize(("when", "kind", "busy", "layout"), OF_LAYOUTS, ids=["-".join(m) for m in OF_LAYOUTS])
def test_every_checkpoint_is_the_state_of_the_run_at_its_step(
    when: str, kind: KindPolicy, busy: BusyPolicy, layout: str, truths: dict[str, list[dict[str, Any]]], store_name: str
) -> None:
    states = truths[layout]
    lives = Lives(POLICIES[when], kind, busy, layout, store_name)
    for until in (30, 45, 60, 75, STEPS):
        lives.live(states, until=until)
    assert_same(lives.run.copy(), states[STEPS])
    assert lives.crashes == 4
    assert lives.resumes >= 2
    assert lives.failures > 0

    assert lives.repository.check(deep=True).problems == ()
    saved = [info.step for info in lives.repository.checkpoints()]
    assert len(saved) >= 5
    for step in lives.choices.sample(saved, min(8, len(saved))):
        run = Run(layout, seed=9)
        with Checkpointer(run.model, MemoryStore(store_name), **run.arguments) as checkpointer:
            assert checkpointer.resume_from_checkpoint(step) is not None
            assert_same(run.copy(), states[step])
