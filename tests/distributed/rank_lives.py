"""What the ranks of these tests do with their lives.

It must not know what any test expects of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from click_model import Clicks, Reader, build, collection, dense_optimizer, digest, step, whole
from rank_plans import OwnState, Plan, Turn, spread
from rank_processes import connect
from torch import nn

from incremental_ckpt import Checkpointer, EverySteps, Repository, Settings
from incremental_ckpt.storage import LocalStore
from incremental_ckpt.testing import TracingStore

PATIENT = 30.0
"""Seconds; a loaded machine does not take so long."""


def train(
    rank: int, world_size: int, url: str, plan: Plan, steps: int, seed: int, fused: str, timeout: float = PATIENT
) -> tuple[str, int]:
    """Train up to a step, saving at every second one; returns the digest, and the step resumed at."""
    connect(min(PATIENT, 4 * timeout))  # a survivor of a death may be left waiting for another that has given up
    model, optimizer = build(plan, fused, seed=seed)
    reader = Reader(rank)
    with Checkpointer(
        model, url, optimizer=optimizer, state={"reader": reader}, when=EverySteps(2), kind="consecutive",
        busy="wait", settings=Settings(vote_timeout=timeout, low_priority=False),
    ) as checkpointer:  # fmt: skip
        progress = checkpointer.resume_from_checkpoint()
        done = progress.step if progress else 0
        for number in range(done + 1, steps + 1):
            checkpointer.step(number, loss=step(model, optimizer, reader))
    return digest(model, optimizer), done


def run_example(rank: int, world_size: int, arguments: list[str], output: Path) -> int:
    """The example as torchrun starts it."""
    import contextlib

    import dlrm_criteo

    with output.with_suffix(f".{rank}").open("w") as file, contextlib.redirect_stdout(file):
        return dlrm_criteo.main(arguments)


def reshard(rank: int, world_size: int, url: str, plan: Plan, fused: str, steps: int, codec: str = "raw") -> Turn:
    """Resume what other ranks may have saved, with another plan (none: an unsharded model), train on, save."""
    model, optimizer = build(plan, fused, seed=7) if plan else build_unsharded(fused)
    reader = Reader(rank)
    store = TracingStore(LocalStore(url))
    with Checkpointer(
        model, store, optimizer=optimizer, state={"reader": reader}, kind="consecutive", codec=codec,
        settings=Settings(vote_timeout=PATIENT, entry_bytes=64, low_priority=False),
    ) as checkpointer:  # fmt: skip
        progress = checkpointer.resume_from_checkpoint()
        read = [(one.op.key, one.size) for one in store.find("get")]
        resumed = arrays(whole(model, optimizer)) if progress else None
        position = reader.position
        done = progress.step if progress else 0
        for _ in range(steps):
            step(model, optimizer, reader)
        info = checkpointer.save_checkpoint(done + steps).wait()
        manifest = Repository(LocalStore(url)).manifest(info.seq)
    saved = arrays(whole(model, optimizer))
    return Turn(resumed, saved, read, position, info.kind, list(manifest.environment.get("resumed_by_rule", [])))


def build_unsharded(fused: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    connect()
    torch.manual_seed(8)
    model = Clicks(collection())
    return model, dense_optimizer(fused)(model.parameters(), lr=0.1, eps=1e-8)


def arrays(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in state.items()}


def own_state(rank: int, world_size: int, url: str, steps: int) -> OwnState:
    model, optimizer = build(spread("rw"))
    reader = Reader(rank)

    def look() -> tuple[int, float, float]:
        state = torch.get_rng_state()
        drawn = float(torch.rand(1))
        torch.set_rng_state(state)
        return reader.position, float(model.state_dict()["seen"]), drawn

    with (
        captured_warnings() as notes,
        Checkpointer(
            model,
            url,
            optimizer=optimizer,
            state={"reader": reader},
            settings=Settings(vote_timeout=PATIENT, low_priority=False),
        ) as checkpointer,  # fmt: skip
    ):
        progress = checkpointer.resume_from_checkpoint()
        found = look()
        for _ in range(steps):
            step(model, optimizer, reader)
        if steps:
            reader.position += 10 * rank
            checkpointer.save_checkpoint((progress.step if progress else 0) + steps).wait()
        left = look()
    return OwnState(found, left, notes)


@contextmanager
def captured_warnings() -> Iterator[list[str]]:
    """Messages of the library's log that say what was not put back bit for bit."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "not bit for bit" in record.getMessage():
                found.append(record.getMessage())

    log, keep = logging.getLogger("incremental_ckpt"), Keep()
    log.addHandler(keep)
    try:
        yield found
    finally:
        log.removeHandler(keep)
