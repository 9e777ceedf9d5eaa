"""A save is exactly the state of its call, whatever training does while it is being written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gates import Gate
from small_runs import LAYOUTS, Run, assert_same

from incremental_ckpt import Checkpointer, Repository, SaveError, Settings
from incremental_ckpt.format.manifest import RankManifest
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore

TINY = {"pack_bytes": 600, "entry_bytes": 128, "low_priority": False}


def resumed(layout: str, name: str, seed: int = 7, **arguments: Any) -> Run:
    run = Run(layout, seed)
    with Checkpointer(run.model, MemoryStore(name), **run.arguments, **arguments) as checkpointer:
        assert checkpointer.resume_from_checkpoint() is not None
        return run


def rank_manifests(name: str) -> list[RankManifest]:
    repository = Repository(MemoryStore(name))
    return [r for info in repository.checkpoints() for r in repository.rank_manifests(repository.manifest(info.seq))]


def overriding_rows(manifest: RankManifest) -> int:
    """Rows that a base carries as spilled old values: what is read from its tables is stored as ranges."""
    return sum(r.count for s in manifest.shards for r in s.rowsets)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_base_is_the_state_of_its_call_while_training_runs_between_all_its_writes(
    layout: str, store_name: str
) -> None:
    run = Run(layout)
    run.train(2)
    gate = Gate()
    settings = Settings(**TINY)
    with Checkpointer(run.model, FaultStore(MemoryStore(store_name), gate), **run.arguments, settings=settings) as c:
        handle = c.save_checkpoint(2)
        at_the_call = run.copy()
        packs = gate.between_writes(lambda _key: (run.train(), None)[1])
        handle.wait()
    assert packs > 5
    assert run.steps_done > 7
    assert_same(resumed(layout, store_name).copy(), at_the_call)


@pytest.mark.parametrize("layout", ["adagrad", "sparse_adam", "fused"])
def test_a_large_delta_is_streamed_and_is_the_state_of_its_call(layout: str, store_name: str) -> None:
    run = Run(layout)
    gate = Gate()
    settings = Settings(**TINY, snapshot_bytes=1)
    store = FaultStore(MemoryStore(store_name))
    with Checkpointer(run.model, store, **run.arguments, kind="consecutive", settings=settings) as c:
        run.train()
        c.save_checkpoint(1).wait()
        run.train(4)
        store.inject(gate)
        handle = c.save_checkpoint(5)
        at_the_call = run.copy()
        gate.between_writes(lambda _key: (run.train(), None)[1])
        assert handle.wait().kind == "delta"
    assert_same(resumed(layout, store_name).copy(), at_the_call)


@pytest.mark.parametrize("layout", ["adagrad", "fused"])
def test_spilled_old_values_hold_over_what_was_read_from_the_table(layout: str, store_name: str) -> None:
    run = Run(layout)
    gate = Gate()
    # A step's old values fit, those of two do not: each flush finds more than half of the limit.
    settings = Settings(**TINY, preimage_bytes=1400)
    with Checkpointer(run.model, FaultStore(MemoryStore(store_name), gate), **run.arguments, settings=settings) as c:
        handle = c.save_checkpoint(0)
        at_the_call = run.copy()
        gate.between_writes(lambda key: key.endswith(".safetensors") and run.train() and None)
        handle.wait()
    assert sum(map(overriding_rows, rank_manifests(store_name))) > 0
    assert_same(resumed(layout, store_name).copy(), at_the_call)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("preimage_bytes", [1, 700, 1 << 20])
def test_saves_are_exact_beside_a_training_thread_that_never_waits_for_them(
    seed: int, preimage_bytes: int, store_name: str
) -> None:
    layout = ("adagrad", "fused")[seed % 2]
    run = Run(layout, seed)
    settings = Settings(**TINY, snapshot_bytes=1 if seed < 2 else 1 << 20, preimage_bytes=preimage_bytes)
    states = {}
    with Checkpointer(run.model, MemoryStore(store_name), **run.arguments, settings=settings) as c:
        for kind in ("full", "consecutive", "full", "one-shot", "consecutive", "full"):
            run.train(2)
            handle = c.save_checkpoint(run.steps_done, kind=kind)
            states[run.steps_done] = run.copy()
            while not handle.done():
                run.train()
    for step, state in states.items():
        again = Run(layout, 9)
        with Checkpointer(again.model, MemoryStore(store_name), **again.arguments) as c:
            assert c.resume_from_checkpoint(step) is not None
            assert_same(again.copy(), state)


def test_steps_with_a_closure_go_on_beside_a_stream(store_name: str) -> None:
    table = torch.nn.EmbeddingBag(40, 4, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = table(torch.randint(40, (3, 2))).pow(2).sum()
        loss.backward()
        return loss

    gate = Gate()
    store = FaultStore(MemoryStore(store_name), gate)
    with Checkpointer(table, store, optimizer=optimizer, settings=Settings(**TINY)) as c:
        handle = c.save_checkpoint(0)
        at_the_call = table.weight.detach().clone()
        gate.between_writes(lambda _key: (optimizer.step(closure), None)[1])
        handle.wait()
    assert not torch.equal(table.weight, at_the_call)
    with Checkpointer(table, MemoryStore(store_name), optimizer=optimizer) as c:
        c.resume_from_checkpoint()
    assert torch.equal(table.weight, at_the_call)


def test_without_streams_everything_is_copied_in_the_stall(store_name: str) -> None:
    run = Run()
    gate = Gate()
    settings = Settings(**TINY, stream=False, preimage_bytes=1)
    with Checkpointer(run.model, FaultStore(MemoryStore(store_name), gate), **run.arguments, settings=settings) as c:
        handle = c.save_checkpoint(0)
        at_the_call = run.copy()
        gate.between_writes(lambda _key: (run.train(), None)[1])
        handle.wait()
    assert sum(map(overriding_rows, rank_manifests(store_name))) == 0
    assert_same(resumed("adagrad", store_name).copy(), at_the_call)

    with torch.no_grad():
        run.rows_of("tables.bag").mul_(2)


def load_other_weights(run: Run) -> None:
    run.model.load_state_dict(Run("adagrad", 3).model.state_dict())


def edit_in_place_of_the_parameter(run: Run) -> None:
    with torch.no_grad():
        run.model.tables.bag.weight.mul_(2)


@pytest.mark.parametrize("edit", [load_other_weights, edit_in_place_of_the_parameter])
def test_rows_edited_behind_a_stream_are_never_committed_as_the_state_of_the_call(
    edit: Callable[[Run], None], store_name: str
) -> None:
    run = Run()
    gate = Gate()
    store = FaultStore(MemoryStore(store_name), gate)
    c = Checkpointer(run.model, store, **run.arguments, settings=Settings(**TINY))
    handle = c.save_checkpoint(0)
    before = run.copy()
    gate.wait()
    edit(run)
    store.heal()
    gate.go()
    try:
        handle.wait()
    except SaveError as error:
        assert "tables." in str(error)
    else:
        assert_same(resumed("adagrad", store_name).copy(), before)
    c.save_checkpoint(1).wait()
    edited = run.copy()
    c.close()
    assert_same(resumed("adagrad", store_name).copy(), edited)
