"""Lives of a run that logs the ids of the samples that it trains, until it is done or killed: hard, or by a store that
crashes.

It is imported by forked processes; it must not know what a right log is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from incremental_ckpt import Checkpointer, EverySteps, PairedReader, SaveHandle, Settings
from incremental_ckpt.storage import LocalStore, Store
from incremental_ckpt.testing import FaultStore, Op, Perform
from incremental_ckpt.testing.stores import WRITES

SAMPLES, BATCH, STEPS = 46, 5, 34  # ten batches an epoch, the last of one sample; three epochs and four batches


class Samples(torch.utils.data.Dataset[int]):
    """Their own ids, so that any mistake in reading is one in the log."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def data_loader(workers: int, *, seeds_itself: bool) -> Any:
    """A StatefulDataLoader; unless it seeds itself, every ``iter()`` draws from the global generator."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import RandomSampler

        # In a forked life the default would be to load torch anew for every worker.
        context = "fork" if workers else None
        # Of its own: what the loader draws for its workers would come between the permutations of two epochs.
        sampler = RandomSampler(Samples(), generator=torch.Generator().manual_seed(3))
        return StatefulDataLoader(
            Samples(), batch_size=BATCH, sampler=sampler, num_workers=workers, multiprocessing_context=context,
            generator=torch.Generator() if seeds_itself else None,
        )  # fmt: skip


class CriteoEpochs:
    """The example's endless reader; ids are those of its first column, which the file numbers."""

    def __init__(self, path: Path) -> None:
        sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
        from criteo import CriteoReader

        self._reader = CriteoReader(path, batch_size=BATCH, max_rows_per_table=1000)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self._reader:
            yield torch.from_numpy(batch.ids[0])

    def state_dict(self) -> dict[str, Any]:
        return self._reader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._reader.load_state_dict(state)


class KillAtWrite:
    """Kills the process at the n-th write to the store, before or after it lands."""

    def __init__(self, number: int, *, landed: bool) -> None:
        self.left = number
        self.landed = landed

    def __call__(self, op: Op, perform: Perform) -> Any:
        if op.kind in WRITES:
            self.left -= 1
            if self.left == 0:
                if self.landed:
                    perform(op)
                os.kill(os.getpid(), signal.SIGKILL)
        return perform(op)


class ReadAhead:
    """Gives the batches of an iterator, each only once the next two are read, as a prefetching trainer does."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._iterator: Any = None
        self._ended = False

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        if dataloader_iter is not self._iterator:
            self._iterator, self._ended = dataloader_iter, False
        while not self._ended and len(self._held) < 3:
            try:
                self._held.append(next(dataloader_iter))
            except StopIteration:
                self._ended = True
        if not self._held:
            raise StopIteration
        return self._held.pop(0)


def reader_of(name: str, data: Path, *, ahead: bool) -> Any:
    reader: Any = CriteoEpochs(data) if name == "criteo" else data_loader(int(name), seeds_itself=not ahead)
    return PairedReader(reader) if ahead else reader


def batches_of(reader: Any, ahead: bool) -> Iterator[Any]:
    """One epoch."""
    if not ahead:
        yield from reader
        return
    pipeline = ReadAhead()
    while (batch := reader.progress(pipeline)) is not None:
        yield batch


def live(
    folder: Path, data: Path, name: str, ahead: bool, kill_step: int = 0, kill_write: int = 0, landed: bool = False
) -> None:
    """Train from the newest checkpoint on. Killed in the middle of a step, or at a write of the store; 0: not."""
    with (folder / "errors").open("a") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = FaultStore(LocalStore(str(folder / "store")))
    if kill_write:
        store.inject(KillAtWrite(kill_write, landed=landed))
    seed = 0 if not (folder / "log").exists() else os.getpid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def within(step: int) -> None:
        if step == kill_step:
            os.kill(os.getpid(), signal.SIGKILL)

    policies = {"when": EverySteps(2), "kind": "consecutive", "busy": "wait"}
    reader = reader_of(name, data, ahead=ahead)
    train(reader, store, policies, lambda *line: os.write(log, (json.dumps(line) + "\n").encode()), within, seed=seed)


def train(
    reader: Any,
    store: Store,
    policies: Mapping[str, Any],
    log: Callable[..., Any],
    within: Callable[[int], None],
    saving: Callable[[SaveHandle], None] = lambda handle: None,
    *,
    seed: int,
    steps: int = STEPS,
) -> None:
    """Train from the newest checkpoint on, until a step.

    Args:
        reader: one that is paired is read ahead.
        policies: when, which kind, busy; and the clock, where they look at one.
        log: called with "resumed", step; and with "trained", step, epoch, ids, a number drawn from the global
            generator.
        within: called with its number in the middle of each step.
        saving: called with each save that was handed over.
        seed: of everything that a checkpoint is to bring back.
    """
    torch.manual_seed(seed)
    model = torch.nn.EmbeddingBag(1000, 4, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(
        model, store, optimizer=optimizer, state={"reader": reader}, settings=Settings(low_priority=False), **policies
    ) as checkpointer:
        progress = checkpointer.resume_from_checkpoint()
        step, epoch = (progress.step, progress.epoch or 0) if progress else (0, 0)
        log("resumed", step)
        while step < steps:
            for ids in batches_of(reader, isinstance(reader, PairedReader)):
                step += 1
                optimizer.zero_grad()
                model(ids.reshape(1, -1)).sum().backward()
                within(step)
                optimizer.step()
                log("trained", step, epoch, ids.tolist(), torch.rand(()).item())
                handle = checkpointer.step(step, epoch=epoch)
                if handle is not None:
                    saving(handle)
                if step == steps:
                    return
            epoch += 1
