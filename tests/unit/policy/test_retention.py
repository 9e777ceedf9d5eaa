"""``keep``: what no policy keeps is pruned in the background after each save, and a failing prune fails no save."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, EverySteps, KeepBest, KeepEvery, KeepLast, Repository, Settings
from incremental_ckpt.events import PruneEvent, SaveEvent
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore, Stall, fail, on

SETTINGS = Settings(low_priority=False)


def train(
    store_name: str, keep: Any, steps: int, *injectors: Any, kind: Any = "one-shot", auc: float | None = None
) -> tuple[Run, list[Any]]:
    """Saves at every second step; the loss is the distance from step 6. Resumes first, if there is something."""
    metrics = {} if auc is None else {"auc": auc}
    run, events = Run(), list[Any]()
    with Checkpointer(
        run.model, FaultStore(MemoryStore(store_name), *injectors), **run.arguments, when=EverySteps(2), kind=kind,
        keep=keep, busy="wait", on_event=events.append, settings=SETTINGS,
    ) as checkpointer:  # fmt: skip
        progress = checkpointer.resume_from_checkpoint()
        done = progress.step if progress else 0
        for step in range(done + 1, done + steps + 1):
            run.train()
            checkpointer.step(step, loss=abs(6.0 - step), metrics=metrics)
    return run, events


def steps_in(store_name: str) -> list[int]:
    return [i.step for i in Repository(MemoryStore(store_name)).checkpoints()]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (KeepLast(2), {10, 12}),
        (KeepBest(1, "loss", "min"), {6, 12}),
        (KeepEvery(4), {4, 8, 12}),
        ([KeepLast(1), KeepBest(1, "loss", "min")], {6, 12}),
        (None, {2, 4, 6, 8, 10, 12}),
    ],
)
def test_what_is_kept_and_what_that_needs_stays_and_the_rest_goes(
    keep: KeepLast | Sequence[KeepLast], kept: set[int], store_name: str
) -> None:
    run, _ = train(store_name, keep, 12)
    assert set(steps_in(store_name)) == kept | {2}  # the base that all deltas count from
    repository = Repository(MemoryStore(store_name))
    assert repository.check(deep=True).problems == ()
    resumed = Run(seed=9)
    with Checkpointer(resumed.model, MemoryStore(store_name), **resumed.arguments) as checkpointer:
        checkpointer.resume_from_checkpoint()
        assert_same(resumed.copy(), run.copy())


@pytest.mark.parametrize(
    ("auc", "told"),
    [
        (0.7, "keep: no checkpoint has the metric AUC, so all are kept until one has it (metrics: auc)"),
        (None, "keep: no checkpoint has the metric AUC, so all are kept until one has it (metrics: none)"),
    ],
)
def test_a_metric_that_no_checkpoint_has_is_told_once_since_all_is_kept(
    store_name: str, caplog: pytest.LogCaptureFixture, auc: float | None, told: str
) -> None:
    train(store_name, [KeepBest(1, "AUC"), KeepLast(2)], 8, kind="full", auc=auc)
    assert steps_in(store_name) == [2, 4, 6, 8]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [told]


def test_a_metric_that_is_a_number_nowhere_is_told_and_one_that_ranks_is_not(
    store_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(store_name, [KeepBest(1, "auc"), KeepBest(1, "loss", "min")], 4, kind="full", auc=float("nan"))
    assert steps_in(store_name) == [2, 4]
    assert caplog.messages == ["keep: the metric auc is a number in no checkpoint, so all are kept until it is in one"]


def test_it_is_told_what_was_forgotten(store_name: str) -> None:
    _, events = train(store_name, KeepLast(1), 8, kind="full")
    assert steps_in(store_name) == [8]
    pruned = [e for e in events if isinstance(e, PruneEvent)]
    assert [(e.step, e.forgotten) for e in pruned] == [(4, (1,)), (6, (2,)), (8, (3,))]
    assert all(e.bytes_freed > 0 and e.failures == () for e in pruned)


def test_retention_goes_on_after_a_restart_from_what_the_store_holds(store_name: str) -> None:
    train(store_name, None, 8, kind="full")
    train(store_name, KeepLast(2), 2, kind="full")
    assert steps_in(store_name) == [8, 10]


def test_a_prune_that_fails_is_told_and_made_up_for_and_fails_no_save(store_name: str) -> None:
    _, events = train(store_name, KeepLast(1), 8, fail(on("put_if_absent", "*.gone.json", at=1)), kind="full")
    failed, *later = [e for e in events if isinstance(e, PruneEvent)]
    assert failed.step == 4
    assert failed.forgotten == ()
    assert len(failed.failures) == 1
    assert [e.forgotten for e in later] == [(1, 2), (3,)]
    assert [e.step for e in events if isinstance(e, SaveEvent)] == [2, 4, 6, 8]


def test_a_save_is_durable_before_anything_is_pruned_and_nobody_waits_for_the_prune(store_name: str) -> None:
    run = Run()
    stall = Stall(on("put_if_absent", "*.gone.json"))
    with Checkpointer(
        run.model, FaultStore(MemoryStore(store_name), stall), **run.arguments, kind="full", keep=KeepLast(1),
        settings=SETTINGS,
    ) as checkpointer:  # fmt: skip
        for step in (1, 2):
            run.train()
            checkpointer.save_checkpoint(step).wait()
        assert stall.reached.wait(60)
        run.train()
        third = checkpointer.save_checkpoint(3)  # the snapshot is taken while the prune goes on
        assert not third.done()
        stall.release()
    assert steps_in(store_name) == [3]
