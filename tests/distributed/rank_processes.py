"""Ranks as processes: forked from one that has loaded torch and TorchRec, connected as torchrun connects them.

No wait is without a limit.

It must not know what the ranks do.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

Work = str
"""``module.function`` of ``function(rank, world_size, *arguments)``: what a rank does. Only the ranks import it."""

HOST = "127.0.0.1"
COLLECTIVE_SECONDS = 30


@dataclass(frozen=True)
class Raised:
    """An error that ended a rank's work."""

    kind: str
    text: str
    trace: str


@dataclass(frozen=True)
class Returned:
    """What a rank's work returned."""

    value: Any


Outcome = Returned | Raised | None
"""None: the rank died, or was not done in time."""


class Group:
    """The ranks of one life of a job. The rendezvous store lives here, as it lives in torchrun's agent: it outlives the
    ranks."""

    def __init__(self, context: ForkServerContext, world_size: int, work: Work, arguments: Sequence[Any]) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_live, args=(theirs, self._store.port, rank, world_size, work, tuple(arguments)), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def kill(self, *ranks: int) -> None:
        """SIGKILL; no rank named: all of them."""
        for rank in ranks or range(len(self._processes)):
            self._processes[rank].kill()
            self._processes[rank].join(30)

    def alive(self) -> bool:
        return any(process.is_alive() for process in self._processes)

    def finished(self) -> bool:
        return all(end.poll() for end in self._ends)

    def outcomes(self, seconds: float) -> list[Outcome]:
        """Of each rank, in order."""
        deadline = time.monotonic() + seconds
        found = [_received(end, deadline) for end in self._ends]
        for end in self._ends:
            try:
                end.send("all are done")
            except OSError:
                pass  # it is dead
        for process in self._processes:
            process.join(20)
            process.kill()
            process.join(20)
        return found


class Ranks:
    """Starts groups of ranks."""

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context

    @contextmanager
    def started(self, world_size: int, work: Work, *arguments: Any) -> Iterator[Group]:
        group = Group(self._context, world_size, work, arguments)
        try:
            yield group
        finally:
            group.kill()

    def outcomes(self, world_size: int, work: Work, *arguments: Any, seconds: float = 90) -> list[Outcome]:
        with self.started(world_size, work, *arguments) as group:
            return group.outcomes(seconds)

    def run(self, world_size: int, work: Work, *arguments: Any, seconds: float = 90) -> list[Any]:
        """What each rank's work returns; fails where one raised, died or was not done in time."""
        found = self.outcomes(world_size, work, *arguments, seconds=seconds)
        failed = [
            f"rank {rank}: {outcome.trace if outcome else f'died, or was not done after {seconds} s'}"
            for rank, outcome in enumerate(found)
            if not isinstance(outcome, Returned)
        ]
        assert not failed, "\n".join(failed)
        return [outcome.value for outcome in found if isinstance(outcome, Returned)]


def _received(end: Connection, deadline: float) -> Outcome:
    try:
        return end.recv() if end.poll(max(0.0, deadline - time.monotonic())) else None
    except EOFError:
        return None


def _live(end: Connection, port: int, rank: int, world_size: int, work: Work, arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HOST, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    outcome: Outcome
    try:
        module, _, function = work.rpartition(".")
        outcome = Returned(getattr(importlib.import_module(module), function)(rank, world_size, *arguments))
    except BaseException as error:
        outcome = Raised(type(error).__name__, str(error), traceback.format_exc())
    end.send(outcome)
    end.poll(60)  # a rank that left now would take its connections with it
    os._exit(0)


def connect(seconds: float = COLLECTIVE_SECONDS) -> None:
    """Join the ranks of this life, as a script under torchrun does; its collectives take at most so long."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
