"""A prune tells how many bytes of what goes are dealt with."""

from __future__ import annotations

from typing import Any

import pytest
from test_pruning import chain_of

from incremental_ckpt import Repository
from incremental_ckpt.errors import StorageError
from incremental_ckpt.policy import KeepLast
from incremental_ckpt.pruning import prune
from incremental_ckpt.testing import FaultStore, fail, on

Told = list[tuple[int, int]]


def test_each_removal_moves_it_and_it_ends_at_all() -> None:
    told: Told = []
    report = prune(chain_of("bbbbb").repository, KeepLast(1), dry_run=False, progress=lambda *state: told.append(state))
    sizes = [removal.bytes for removal in report.plan.removals]
    assert told == [(sum(sizes[: n + 1]), report.plan.bytes) for n in range(4)]
    assert told[-1] == (report.bytes_freed, report.bytes_freed)


def test_what_cannot_be_deleted_is_dealt_with_all_the_same() -> None:
    refuse = fail(on("delete", "data/00000002-*"), lambda _: StorageError("not yours"))
    repository = Repository(FaultStore(chain_of("bbbb").repository.store, refuse))
    told: Told = []
    report = prune(repository, KeepLast(1), dry_run=False, progress=lambda *state: told.append(state))
    assert len(report.failures) == 1
    assert told[-1] == (report.plan.bytes, report.plan.bytes)
    assert report.bytes_freed < report.plan.bytes


def test_a_dry_run_deals_with_nothing() -> None:
    told: Told = []
    prune(chain_of("bbb").repository, KeepLast(1), progress=lambda *state: told.append(state))
    assert told == []


@pytest.mark.parametrize("given", [3, "x", []], ids=repr)
def test_a_progress_that_cannot_be_called_is_refused_before_anything_goes(given: Any) -> None:
    repository = chain_of("bbb").repository
    with pytest.raises(TypeError, match="progress takes a function of bytes done and bytes in all"):
        prune(repository, KeepLast(1), dry_run=False, progress=given)
    assert repository.listing().seqs == (1, 2, 3)
