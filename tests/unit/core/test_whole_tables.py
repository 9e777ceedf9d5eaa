"""A delta that carries all rows of a table whose user could change that says so, once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from incremental_ckpt import Checkpointer


def warnings_of(
    place: Path, caplog: pytest.LogCaptureFixture, rows: int = 8192, kind: str = "consecutive", **options: Any
) -> list[str]:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {name: torch.nn.EmbeddingBag(rows, 32, mode="sum", **options) for name in ("item", "user")}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    with Checkpointer(model, place, optimizer=optimizer, kind=kind) as ckpt:
        for step in (1, 2, 3):
            caplog.clear()
            sum(bag(torch.tensor([[step, 2]])).sum() for bag in model.values()).backward()
            optimizer.step()
            ckpt.save_checkpoint(step).wait()
            told.append([r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING])
    assert told[0] == told[2] == []
    return told[1]


def test_dense_gradients_of_tables_are_told_at_the_first_delta_and_never_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = warnings_of(tmp_path / "run", caplog)
    assert line.startswith("every delta carries all rows of 2 tables (item, user; 2.1 MB): ")
    assert "sparse=True" in line


@pytest.mark.parametrize("harmless", [{"sparse": True}, {"rows": 100}, {"kind": "full"}, {"max_norm": 1.0}], ids=str)
def test_nothing_is_told_where_nothing_is_to_be_done_or_gained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harmless: dict[str, Any]
) -> None:
    assert warnings_of(tmp_path / "run", caplog, **harmless) == []


def test_a_table_that_is_tied_to_a_dense_layer_could_not_be_sparse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.ModuleDict({"words": torch.nn.Embedding(8192, 32), "head": torch.nn.Linear(32, 8192, bias=False)})
    model["head"].weight = model["words"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model, tmp_path / "run", optimizer=optimizer, kind="consecutive") as ckpt:
        for step in (1, 2):
            model["head"](model["words"](torch.tensor([step]))).sum().backward()
            optimizer.step()
            ckpt.save_checkpoint(step).wait()
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
