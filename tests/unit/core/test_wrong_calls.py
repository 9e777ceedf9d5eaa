"""Wrong arguments of the Checkpointer, of a save's handle and of the verbs are refused at once, by name."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_wrong_arguments import ANYTHING, FUNCTIONS, Call, refuses_clearly

from incremental_ckpt import Checkpointer, KeepLast, PairedReader, Repository, compact, import_checkpoint, prune
from incremental_ckpt.storage import MemoryStore

NAMES = itertools.count()


def checkpointer(**options: Any) -> Checkpointer:
    model = torch.nn.EmbeddingBag(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Checkpointer(model, MemoryStore(f"calls-{next(NAMES)}"), optimizer=optimizer, **options)


def saved() -> Repository:
    with checkpointer() as made:
        made.save_checkpoint(1).wait()
        return made._repository


def made(name: str, value: Any, _: Path) -> None:
    checkpointer(**{name: value}).close()


def waited(value: Any, _: Path) -> None:
    with checkpointer() as ckpt:
        handle = ckpt.save_checkpoint(1)
        handle.wait()
        handle.wait(value)


def called(name: str, argument: str, value: Any, _: Path) -> None:
    with checkpointer() as ckpt:
        getattr(ckpt, name)(**{"step": 1, argument: value})


CALLS: dict[str, tuple[Call, set[str]]] = {
    "when": (partial(made, "when"), set()),
    "strict": (partial(made, "strict"), {"True"}),
    "clock": (partial(made, "clock"), FUNCTIONS),
    "on_event": (partial(made, "on_event"), {"None", *FUNCTIONS}),
    "keep": (partial(made, "keep"), {"None", "list"}),
    "step.step": (partial(called, "step", "step"), {"0", "3"}),
    "save_checkpoint.step": (partial(called, "save_checkpoint", "step"), {"0", "3"}),
    "save_checkpoint.epoch": (partial(called, "save_checkpoint", "epoch"), {"None", "0", "3"}),
    "resume_from_checkpoint.step": (partial(called, "resume_from_checkpoint", "step"), {"None"}),
    "SaveHandle.wait": (waited, {"None", "0", "3", "2.5"}),
    "Repository.store": (lambda value, _: Repository(value), set()),
    "Repository.read_table.seq": (lambda value, _: saved().read_table("weight", value), {"None"}),
    "Repository.read_table.rows": (lambda value, _: saved().read_table("weight", rows=value), set()),
    "Repository.chain.seq": (lambda value, _: saved().chain(value), {"None"}),
    "prune.repository": (lambda value, _: prune(value, KeepLast(1)), set()),
    "prune.keep": (lambda value, _: prune(saved(), value), set()),
    "prune.dry_run": (lambda value, _: prune(saved(), KeepLast(1), dry_run=value), {"True"}),
    "compact.repository": (lambda value, _: compact(value), set()),
    "compact.seq": (lambda value, _: compact(saved(), value), {"None"}),
    "compact.memory": (lambda value, _: compact(saved(), memory=value), set()),
    "compact.shard": (lambda value, _: compact(saved(), shard=value), set()),
    "compact.progress": (lambda value, _: compact(saved(), progress=value), {"None", *FUNCTIONS}),
    "import_checkpoint.source": (lambda value, _: import_checkpoint(value, Repository(MemoryStore())), set()),
    "import_checkpoint.repository": (lambda value, place: import_checkpoint(place, value), set()),
    "import_checkpoint.tables": (
        lambda value, place: import_checkpoint(place, Repository(MemoryStore()), tables=value), set(),
    ),
    "PairedReader.reader": (lambda value, _: PairedReader(value), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_taken_is_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, taken = CALLS[name]
    monkeypatch.chdir(tmp_path)
    found = {what for what, value in ANYTHING.items() if not refuses_clearly(partial(call, value, tmp_path))}
    assert found == taken
