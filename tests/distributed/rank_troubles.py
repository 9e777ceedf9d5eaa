"""What the ranks live through when stores fail, ranks die or do different things. Each rank tells what it saw.

It must not know what any test expects. A plain table under DistributedDataParallel is enough here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rank_processes import connect
from torch import nn

from incremental_ckpt import Checkpointer, EverySeconds, EverySteps, Repository, Settings, opening
from incremental_ckpt.errors import CheckpointError
from incremental_ckpt.storage import LocalStore
from incremental_ckpt.testing import FaultStore, Stall, fail, on

ROWS = 60
Seen = tuple[str, str]
"""The class of an error, and its text."""


class Model(nn.Module):
    def __init__(self, rows: int = ROWS, width: int = 1) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, 4, mode="sum", sparse=True)
        self.over = nn.Linear(4, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.over(self.table(ids)).pow(2).mean()


class Run:
    """A model that all ranks train together."""

    def __init__(self, rank: int, rows: int = ROWS, width: int = 1) -> None:
        torch.manual_seed(1)
        self.rank = rank
        self.model = nn.parallel.DistributedDataParallel(Model(rows, width))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, *rows: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor([[row + self.rank for row in rows]])).backward()
        self.optimizer.step()

    def checkpointer(self, store: Any, timeout: float = 30, **options: Any) -> Checkpointer:
        # On a loaded machine a thread of low priority may wait for its turn longer than these short limits.
        settings = Settings(vote_timeout=timeout, drain_timeout=20, low_priority=False)
        return Checkpointer(
            self.model, store, optimizer=self.optimizer, settings=settings, kind="consecutive", **options
        )


def error_of(call: Callable[[], Any]) -> Seen:
    try:
        found = call()
    except (CheckpointError, ValueError, TypeError, ArithmeticError) as error:
        return type(error).__name__, str(error)
    return "", str(found)


def seqs_in(url: str) -> tuple[int, ...]:
    return Repository(LocalStore(url)).listing().seqs


def a_store_that_fails(rank: int, world_size: int, url: str, failing: int, key: str) -> dict[str, Any]:
    """Save, save while the store of one rank fails, save again."""
    connect()
    run = Run(rank)
    store = FaultStore(LocalStore(url))
    with run.checkpointer(store, timeout=2) as checkpointer:
        run.step(0)
        checkpointer.save_checkpoint(1).wait()
        run.step(10)
        if rank == failing:
            store.inject(fail(on(("put", "put_if_absent"), key), lambda op: OSError(28, "no space left on device")))
        waited = error_of(checkpointer.save_checkpoint(2).wait)
        seqs = seqs_in(url)
        store.heal()
        run.step(20)
        rows = checkpointer.save_checkpoint(3).wait().rows
        checkpointer.save_checkpoint(4)
    return {
        "waited": waited,
        "seqs": seqs,
        "rows": rows,
        "table": run.model.module.table.weight.detach().numpy(),
    }


def a_store_that_is_deleted(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """Somebody deletes the folder between two saves. Ranks are told long before they would give up waiting."""
    connect()
    run = Run(rank)
    with run.checkpointer(url, timeout=600) as checkpointer:
        for number in (1, 2):
            run.step(number)
            checkpointer.save_checkpoint(number).wait()
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(url)
        torch.distributed.barrier()
        waited = error_of(checkpointer.save_checkpoint(3).wait)
        run.step(3)
        kind = checkpointer.save_checkpoint(4).wait().kind
        run.step(4)
        checkpointer.save_checkpoint(5).wait()
        trained = run.model.module.table.weight.detach().clone()
        run.step(5)
        resumed = checkpointer.resume_from_checkpoint().step
        same = torch.equal(trained, run.model.module.table.weight)
    return {"waited": waited, "kind": kind, "resumed": resumed, "same": same}


def a_failure_nobody_waited_for(rank: int, world_size: int, url: str) -> list[Seen]:
    """The next meeting tells it, on all ranks; the one after saves."""
    connect()
    run = Run(rank)
    store = FaultStore(LocalStore(url))
    with run.checkpointer(store, when=EverySteps(1), busy="wait") as checkpointer:
        if rank == 1:
            store.inject(fail(on("put", "data/*", at=1), lambda op: OSError(28, "no space left on device")))
        seen = []
        for number in range(1, 5):
            run.step(number)
            seen.append(error_of(lambda: checkpointer.step(number)))  # noqa: B023 - called at once
    return seen


def a_store_that_hangs(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """The store of rank 1 takes a put and does not answer until three saves have been tried."""
    connect()
    run = Run(rank)
    store = FaultStore(LocalStore(url))
    seen = []
    with run.checkpointer(store, timeout=1.5, when=EverySteps(1)) as checkpointer:
        run.step(0)
        checkpointer.save_checkpoint(1).wait()
        stall = store.inject(Stall(on("put", "data/*"))) if rank == 1 else None
        for number in (2, 3, 4):
            run.step(10 * number)

            def save(number: int = number) -> Any:
                handle = checkpointer.step(number)
                return handle.wait() if handle is not None and rank == 0 else handle

            seen.append(error_of(save))
        if stall is not None:
            stall.release()
            store.heal()
            assert checkpointer._saver._flight is not None, seen
            assert checkpointer._saver._flight.written.wait(20)
        run.step(50)  # rank 0 is here only when rank 1 is
        rows = checkpointer.save_checkpoint(5).wait().rows
    return {"seen": seen, "rows": rows, "seqs": seqs_in(url)}


def a_store_that_is_slow(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """The store of rank 1 answers late, and in time."""
    connect()
    run = Run(rank)
    store = FaultStore(LocalStore(url))
    with run.checkpointer(store) as checkpointer:
        run.step(0)
        checkpointer.save_checkpoint(1).wait()
        run.step(10)
        stall = store.inject(Stall(on("put", "data/*"))) if rank == 1 else None
        handle = checkpointer.save_checkpoint(2)
        assert stall is None or stall.reached.wait(20)
        torch.distributed.barrier()
        done, seqs = handle.done(), seqs_in(url)
        torch.distributed.barrier()
        run.step(20)  # training goes on, and what it changes is of the next save
        if stall is not None:
            stall.release()
        saved = handle.wait()
        next_rows = checkpointer.save_checkpoint(3).wait().rows
    return {"done": done, "seqs": seqs, "rows": [saved.rows, next_rows]}


def a_death_in_a_save(rank: int, world_size: int, url: str, dying: int) -> dict[str, Seen]:
    connect()
    run = Run(rank)
    store = FaultStore(LocalStore(url))
    checkpointer = run.checkpointer(store, timeout=1.5)
    run.step(0)
    checkpointer.save_checkpoint(1).wait()
    if rank == dying:
        deadly = "put_if_absent" if rank == 0 else "put"  # rank 0 has all votes then
        store.inject(lambda op, perform: os._exit(9) if op.kind == deadly else perform(op))
    save = error_of(checkpointer.save_checkpoint(2).wait)
    return {
        "save": save,
        "next": error_of(lambda: checkpointer.save_checkpoint(3)),
        "end": error_of(checkpointer.close),
    }


def different_calls(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """Ranks that save at different steps, in different calls, or do not come; then all do the same."""
    connect()
    run = Run(rank)
    with run.checkpointer(url, timeout=2) as checkpointer:
        run.step(0)
        steps = error_of(lambda: checkpointer.save_checkpoint(5 + rank))
        calls = error_of(lambda: checkpointer.resume_from_checkpoint() if rank else checkpointer.save_checkpoint(7))
        absent = []
        shared = torch.distributed.distributed_c10d._get_default_store()
        if rank == 2:  # it comes to these meetings when the others have given up
            shared.wait(["given up"], timedelta(seconds=30))
        for number in (8, 9):
            absent.append(error_of(lambda: checkpointer.save_checkpoint(number)))  # noqa: B023
        if rank == 0:
            shared.set("given up", "")
        run.step(1)
        last = error_of(checkpointer.save_checkpoint(12).wait)
    return {
        "steps": steps,
        "calls": calls,
        "absent": absent,
        "last": last,
        "seqs": Repository(LocalStore(url)).listing().seqs,
    }


class Counter:
    def __init__(self) -> None:
        self.broken = False

    def state_dict(self) -> dict[str, int]:
        if self.broken:
            raise ZeroDivisionError("the reader has nothing to divide by")
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.broken:
            raise ZeroDivisionError("the reader has nothing to divide by")


def different_ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Rank 1 is not like the others, in one way after another; nothing is saved until it is."""
    connect()
    url = f"{folder}/store"
    seen: dict[str, Any] = {}
    odd = rank == 1
    table = Run(rank)
    table.model.module.table = nn.EmbeddingBag(ROWS + odd, 4, mode="sum", sparse=True)
    seen["table"] = error_of(lambda: table.checkpointer(url))
    run = Run(rank)
    wider = Run(rank)
    wider.model.module.over = nn.Linear(4, 1 + odd)
    seen["dense"] = error_of(lambda: wider.checkpointer(url))
    fewer = Run(rank)
    fewer.optimizer = (torch.optim.SGD if odd else torch.optim.Adagrad)(fewer.model.parameters(), lr=0.1)
    seen["optimizer"] = error_of(lambda: fewer.checkpointer(url))
    seen["objects"] = error_of(lambda: run.checkpointer(url, state={"scheduler" if odd else "reader": Counter()}))
    version = opening.__version__
    opening.__version__ = "0.0.1" if odd else version
    seen["version"] = error_of(lambda: run.checkpointer(url))
    opening.__version__ = version
    if rank == 0:
        Path(folder, "other").mkdir()
        Path(folder, "other", "novel.txt").write_text("no repository")
    seen["store"] = error_of(lambda: run.checkpointer(f"{folder}/{'other' if odd or rank == 0 else 'store'}"))
    seen["written"] = Path(url).exists() and len(list(Path(url).iterdir()))

    reader = Counter()
    with run.checkpointer(url, state={"reader": reader}) as checkpointer:
        run.step(0)
        reader.broken = odd
        seen["state"] = error_of(lambda: checkpointer.save_checkpoint(1))
        reader.broken = False
        seen["saved"] = checkpointer.save_checkpoint(2).wait().seq
    with run.checkpointer(url, state={"reader": reader}) as checkpointer:
        reader.broken = odd
        seen["loading"] = error_of(checkpointer.resume_from_checkpoint)
        reader.broken = False
        seen["resumed"] = checkpointer.resume_from_checkpoint().step
        # Damage that one rank meets is met by all.
        run.step(5)
        checkpointer.save_checkpoint(3).wait()
        if rank == 0:
            pack = next(Path(url).glob("data/00000002-*/rank-00001-*.safetensors"))
            pack.write_bytes(pack.read_bytes()[:-8] + b"damaged!")
        torch.distributed.barrier()
        seen["fallback"] = checkpointer.resume_from_checkpoint().step
        seen["damaged"] = error_of(lambda: checkpointer.resume_from_checkpoint(step=3))
    return seen


def own_stores(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Every rank writes to a folder of its own."""
    connect()
    run = Run(rank)
    with run.checkpointer(f"{folder}/{rank}", timeout=1.5) as checkpointer:
        run.step(0)
        saved = error_of(checkpointer.save_checkpoint(1).wait)
    return {"saved": saved, "seqs": seqs_in(f"{folder}/{rank}")}


def stores_that_some_see(rank: int, world_size: int, folder: str) -> dict[str, Seen]:
    """One rank after the other is the only one whose store holds the checkpoints; at last all see them."""
    connect()
    run = Run(rank)
    shared = f"{folder}/shared"
    with run.checkpointer(shared) as checkpointer:
        checkpointer.save_checkpoint(1).wait()
    seen = {}
    for seeing in range(world_size):
        with run.checkpointer(shared if rank == seeing else f"{folder}/{rank}") as checkpointer:
            seen[f"only rank {seeing}"] = error_of(checkpointer.resume_from_checkpoint)
    with run.checkpointer(shared) as checkpointer:
        seen["all"] = error_of(checkpointer.resume_from_checkpoint)
    return seen


def by_the_clock(rank: int, world_size: int, url: str, busy: str) -> list[int | None]:
    """Steps of one second by rank 0's clock; other ranks' clocks stand still. The first save hangs for some steps."""
    connect()
    run = Run(rank)
    now = [0.0]
    store = FaultStore(LocalStore(url))
    stall = store.inject(Stall(on("put", "data/*", at=1)))
    saves: list[int | None] = []
    with run.checkpointer(store, when=EverySeconds(5), busy=busy, clock=lambda: now[0]) as checkpointer:
        for number in range(1, 31):
            run.step(number)
            now[0] += 1.0 if rank == 0 else 0.0
            if number == 18:
                stall.release()
                if checkpointer._saver._flight is not None:
                    checkpointer._saver._flight.handle._finished.wait(20)
                torch.distributed.barrier()
            handle = checkpointer.step(number)
            if handle is not None:
                saves.append(handle.step)
                if number >= 18:
                    handle.wait()
                    torch.distributed.barrier()
    return saves


def steps_between_meetings(rank: int, world_size: int, url: str) -> tuple[int, list[int]]:
    """Meetings in nine steps of which none is due, and the ranks that a save writes each dense parameter on."""
    connect()
    run = Run(rank)
    settings = Settings(vote_timeout=30, grace_seconds=0, low_priority=False)
    with Checkpointer(run.model, url, optimizer=run.optimizer, when=EverySteps(10), settings=settings) as checkpointer:
        before = checkpointer._ranks._meetings
        for number in range(1, 10):
            checkpointer.step(number)
        meetings = checkpointer._ranks._meetings - before
        handle = checkpointer.step(10)
        assert handle is not None
        handle.wait()
    manifest = Repository(LocalStore(url)).manifest(handle.seq)
    votes = Repository(LocalStore(url)).rank_manifests(manifest)
    tensors = [sum(len(s.tensors) for s in vote.state if s.name in ("shared", "dense")) for vote in votes]
    return meetings, tensors


def plain_tables(rank: int, world_size: int, url: str, steps: int) -> dict[str, Any]:
    """A replicated table with sparse gradients: tracked, its rows spread over the ranks."""
    connect()
    run = Run(rank)
    with run.checkpointer(url) as checkpointer:
        progress = checkpointer.resume_from_checkpoint()
        begun = run.model.module.table.weight.detach().clone().numpy()
        done = progress.step if progress else 0
        infos = []
        for number in range(done + 1, done + steps + 1):
            run.step(number * 5, number)
            infos.append(checkpointer.save_checkpoint(number).wait())
    return {
        "begun": begun, "ended": run.model.module.table.weight.detach().numpy(),
        "kinds": [i.kind for i in infos], "rows": [i.rows for i in infos], "table_rows": infos[-1].table_rows,
    }  # fmt: skip
