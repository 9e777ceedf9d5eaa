"""What the log says of saves and resumes: sizes that can be read, each failure once, all differences in one line."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from incremental_ckpt import Checkpointer, SaveError, StorageError
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore, fail, on


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    caplog.set_level(logging.INFO, "incremental_ckpt")
    yield lambda level=logging.INFO: [r.getMessage() for r in caplog.records if r.levelno == level]


def checkpointer(store: Any) -> Checkpointer:
    torch.manual_seed(0)
    model = torch.nn.EmbeddingBag(1000, 8, sparse=True)
    return Checkpointer(model, store, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_small_save_and_its_resume_are_not_of_0_mb(told: Any) -> None:
    store = MemoryStore()
    with checkpointer(store) as ckpt:
        ckpt.save_checkpoint(1).wait()
    with checkpointer(store) as ckpt:
        ckpt.resume_from_checkpoint()
    sizes = [re.search(r"[0-9.]+ kB", line) for line in told() if line.startswith(("saved", "resumed"))]
    assert len(sizes) == 2
    assert all(sizes)


def test_a_failure_says_once_which_save_it_was(told: Any) -> None:
    refuse = fail(on("put", "data/*"), lambda op: StorageError("Permission denied"))
    with checkpointer(FaultStore(MemoryStore(), refuse)) as ckpt, pytest.raises(SaveError):
        ckpt.save_checkpoint(7).wait()
    (line,) = told(logging.ERROR)
    assert line.count("save of step 7") == 1
    assert "Permission denied" in line


def test_all_that_differs_from_the_run_before_is_one_warning(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    with checkpointer(store) as ckpt:
        ckpt.save_checkpoint(1).wait()
    monkeypatch.setattr("incremental_ckpt.surroundings.np.__version__", "0.1")
    monkeypatch.setattr("incremental_ckpt.surroundings.torch.__version__", "0.2")
    with checkpointer(store) as ckpt:
        ckpt.resume_from_checkpoint()
    (line,) = told(logging.WARNING)
    assert "numpy: " in line
    assert "0.1 now; torch: " in line
