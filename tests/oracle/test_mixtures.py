"""After any mixture of steps, saves, failed saves and resumes, every checkpoint is the state of its save call."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import LAYOUTS, Run, assert_same

from incremental_ckpt import Checkpointer, CheckpointInfo, Repository, SaveError, SaveHandle, Settings
from incremental_ckpt.repository.read import ChainShards, TableChain
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore, fail, on

KINDS = ("full", "one-shot", "consecutive", "intermittent")
PATTERNS = ("data/*-0000.safetensors", "data/*.safetensors", "data/*/rank-00000.json", "manifests/*")
ROOMY = Settings(low_priority=False)
TINY = Settings(pack_bytes=900, entry_bytes=256, preimage_bytes=1500, low_priority=False)
STREAMED = Settings(pack_bytes=900, entry_bytes=256, preimage_bytes=1 << 20, snapshot_bytes=1, low_priority=False)
COPIED = Settings(stream=False, low_priority=False)


@dataclass
class Journey:
    """One store, the jobs that use it one after another, and a deep copy of the state of every save call."""

    layout: str
    name: str
    choices: random.Random
    settings: Settings
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    committed: dict[int, CheckpointInfo] = field(default_factory=dict)
    failures: int = 0
    resumes: int = 0
    kinds: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start(seed=0)

    def start(self, seed: int) -> None:
        self.store = FaultStore(MemoryStore(self.name))
        self.run = Run(self.layout, seed)
        self.checkpointer = Checkpointer(self.run.model, self.store, **self.run.arguments, settings=self.settings)
        self.handle: SaveHandle | None = None
        self.call = len(self.states)

    def train(self) -> None:
        self.run.train(self.choices.randint(0, 3))

    def settle(self) -> None:
        """What became of the save in flight."""
        if self.handle is None:
            return
        handle, self.handle = self.handle, None
        try:
            self.committed[handle.step] = handle.wait(timeout=60)
        except SaveError:
            self.failures += 1

    def save(self) -> None:
        self.settle()
        self.store.heal()
        if self.choices.random() < 0.25:
            when = on("put", self.choices.choice(PATTERNS[:3]), at=1)
            if self.choices.random() < 0.4:
                when = on("put_if_absent", "manifests/*", at=1)
            self.store.inject(fail(when, landed=self.choices.random() < 0.3))
        step = len(self.states)
        kind = self.choices.choice(KINDS)
        self.handle = self.checkpointer.save_checkpoint(step, loss=float(step), kind=kind)  # type: ignore[arg-type]
        self.states[step] = self.run.copy()
        self.kinds.append(kind)
        if self.choices.random() < 0.3:
            self.settle()

    def resume(self) -> None:
        self.settle()
        self.store.heal()
        if not self.committed:
            return
        if self.choices.random() < 0.6:
            self.checkpointer.close()
            self.start(seed=self.choices.choice([0, 5]))
        step = None if self.choices.random() < 0.7 else self.choices.choice([*self.committed])
        progress = self.checkpointer.resume_from_checkpoint(step)
        assert progress is not None
        assert progress.loss == float(progress.step)
        assert_same(self.run.copy(), self.states[progress.step])
        assert step is not None or progress.step >= max(self.committed)
        self.resumes += 1

    def check_all(self) -> None:
        self.settle()
        self.store.heal()
        self.checkpointer.close()
        repository = Repository(MemoryStore(self.name))
        report = repository.check(deep=True)
        assert report.problems == ()
        assert {i.step for i in repository.checkpoints()} >= self.committed.keys()
        for info in repository.checkpoints():
            assert_same(resumed_state(self.layout, self.name, info.step), self.states[info.step])
            if self.layout != "fused":
                weights = repository.read_table("tables.bag", info.seq)
                assert np.array_equal(weights, self.states[info.step]["model"]["tables.bag.weight"].numpy())


def resumed_state(layout: str, name: str, step: int) -> dict[str, Any]:
    run = Run(layout, 11)
    with Checkpointer(run.model, MemoryStore(name), **run.arguments) as checkpointer:
        assert checkpointer.resume_from_checkpoint(step) is not None
        return run.copy()


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("adagrad", ROOMY), ("adagrad", TINY), ("adagrad", STREAMED), ("sparse_adam", TINY), ("sparse_adam", COPIED),
        ("sgd", STREAMED), ("dense_gradients", TINY), ("dense_gradients", STREAMED),
        ("fused", ROOMY), ("fused", TINY), ("fused", STREAMED),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", [1])
def test_every_checkpoint_of_a_random_mixture_is_the_state_of_its_save_call(
    layout: str, settings: Settings, seed: int, store_name: str
) -> None:
    journey = Journey(layout, store_name, random.Random(seed * 100 + LAYOUTS.index(layout)), settings)
    for _ in range(22):
        journey.train()
        journey.resume() if journey.choices.random() < 0.15 else journey.save()
    journey.check_all()
    assert len(journey.committed) >= 8
    assert journey.failures + journey.resumes > 0


@pytest.mark.parametrize("layout", ["adagrad", "sgd", "sparse_adam"])
def test_a_consecutive_delta_carries_the_changed_rows_and_no_others(layout: str, store_name: str) -> None:
    run = Run(layout)
    with Checkpointer(run.model, MemoryStore(store_name), **run.arguments, kind="consecutive") as checkpointer:
        run.train()  # creates the optimizers' lazy state, which would make the next save a base
        checkpointer.save_checkpoint(0).wait()
        repository = Repository(MemoryStore(store_name))
        for step in range(1, 6):
            before = run.rows_of("tables.bag").clone()
            run.train(2)
            info = checkpointer.save_checkpoint(step).wait()
            changed = (run.rows_of("tables.bag") != before).any(1).nonzero().squeeze(1)
            assert info.kind == "delta"
            assert torch.equal(carried_rows(repository, info.seq, "tables.bag"), changed)


def carried_rows(repository: Repository, seq: int, table: str) -> torch.Tensor:
    ranks = repository.rank_manifests(repository.manifest(seq))
    chain = TableChain(repository, ChainShards([ranks]), table)
    (shard,) = chain.chain[0]
    rows = [chain.row_ids(0, shard, index) for index in range(len(shard.rowsets))]
    return torch.from_numpy(np.unique(np.concatenate(rows)))


@pytest.mark.parametrize("layout", ["adagrad", "sparse_adam"])
def test_edits_of_per_row_optimizer_state_are_in_the_next_delta(layout: str, store_name: str) -> None:
    run = Run(layout)
    with Checkpointer(run.model, MemoryStore(store_name), **run.arguments, kind="consecutive") as c:
        run.train()
        c.save_checkpoint(1).wait()
        optimizer = next(
            o for o in run.arguments["optimizer"].values() if type(o) in (torch.optim.Adagrad, torch.optim.SparseAdam)
        )
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.dim() == 2:
                    value[5] = 7.0
        c.save_checkpoint(2).wait()
    again = Run(layout, 9)
    with Checkpointer(again.model, MemoryStore(store_name), **again.arguments) as c:
        c.resume_from_checkpoint()
    assert_same(again.copy(), run.copy())
