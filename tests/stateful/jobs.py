"""Jobs of one or several ranks for the driver: a model whose updates can be interrupted, and a real Checkpointer.

They must not know the scheduler's choices; all that they do is drawn by the world, once for all ranks of a job.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import turns

from incremental_ckpt import flight
from incremental_ckpt.checkpointer import Checkpointer
from incremental_ckpt.errors import ConflictError, CorruptionError, NotFoundError, SaveError, StorageError
from incremental_ckpt.model import Difference, Field, Shard, Table
from incremental_ckpt.testing import FaultStore, Op, Perform

if TYPE_CHECKING:
    from driver import World

TABLES = (("wide", 4, True), ("narrow", 3, True), ("whole", 1, False))
FIELDS = (Field("weight", "int64", 1), Field("momentum", "int64", 1))
State = dict[str, Any]
"""By ``table.field`` the value of each row; else what the thing is called."""


class Model:
    """A ModelAdapter of its own, and a reader: tables whose updates can be interrupted half way, a dense tensor, a
    position.

    Two tables lie spread over the ranks by rows; the third is on every rank alike, and nobody announces its updates.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self._tables = []
        for name, rows, tracked in TABLES:
            begin, end = (rows * rank // ranks, rows * (rank + 1) // ranks) if tracked else (0, rows)
            tensors = {f.name: torch.zeros((end - begin, 1), dtype=torch.int64) for f in FIELDS}
            shard = Shard(name, rows, 1, begin, end - begin, 0, 1, FIELDS)
            self._tables.append(Table(shard, tensors, tracked, replicated=not tracked))
        self.dense = torch.zeros(2, dtype=torch.int64)
        self.position = 0
        self._mark: Callable[[int, torch.Tensor], None] | None = None

    def tables(self) -> Sequence[Table]:
        return self._tables

    def watch(self, mark: Callable[[int, torch.Tensor], None], mark_all: Callable[[int], None]) -> None:
        self._mark = mark

    def unwatch(self) -> None:
        self._mark = None

    def begin(self) -> None:
        """Its state never changes shape."""

    def state(self) -> State:
        return {"dense": {"weight": self.dense}, "optimizer": {}, "fused": [], "replicated": ("weight",)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.dense.copy_(state["dense"]["weight"])

    def differences(self, fields: object, state: object) -> Sequence[Difference]:
        return ()

    def prepare_restore(self, fields: object, state: object) -> Sequence[Table]:
        return self._tables

    def state_dict(self) -> State:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]

    def train(self, batch: Mapping[str, Sequence[int]], value: int, pause: Callable[[], None]) -> None:
        """Give rows (global ids by table) a new value."""
        for index, table in enumerate(self._tables):
            begin = table.shard.row_start
            own = [row - begin for row in batch[table.shard.table] if 0 <= row - begin < table.shard.rows]
            if not own:
                continue
            rows = torch.tensor(own)
            if table.tracked:
                assert self._mark is not None
                self._mark(index, rows)
            for live in table.tensors.values():
                live[rows] = value
                if table.tracked:
                    pause()  # half updated: a chunk that is copied now is torn
        self.dense += 1
        self.position += 1

    def snapshot(self) -> State:
        found: State = {}
        for table in self._tables:
            for name, live in table.tensors.items():
                found[f"{table.shard.table}.{name}"] = dict(enumerate(live.ravel().tolist(), table.shard.row_start))
        return {**found, "dense": self.dense.tolist(), "position": self.position}


def united(parts: Sequence[State]) -> State:
    """The state of a job from those of its ranks."""
    whole = dict(parts[0])
    for part in parts[1:]:
        for name, value in part.items():
            if "." in name:
                whole[name] = whole[name] | value
    return whole


class SharedStore(FaultStore):
    """One process's handle on the store that outlives it."""

    def close(self) -> None:
        pass


class Job:
    """A training run: its ranks resume, train and save together, until they die, lose or are told to end.

    Attributes:
        decisions: what the job does next, for all its ranks alike.
        faults: how often the store has failed it.
    """

    def __init__(self, world: World, name: str, step: int | None, ranks: int) -> None:
        self.world, self.name, self.wanted_step = world, name, step
        self.ranks = [Rank(self, rank, ranks) for rank in range(ranks)]
        self.id = ""
        self.trail: tuple[str, ...] = ()
        self.own: list[str] = []
        self.asleep = False
        self.decisions: list[Any] = []
        self.meetings: list[dict[int, str]] = []
        self.faults = 0
        self.failures: list[Exception] = []
        self.told: list[Exception] = []

    @property
    def busy(self) -> bool:
        return any(r.handle is not None and not r.handle.done() for r in self.ranks)

    def told_of_conflict(self) -> None:
        world = self.world
        own = max((s for s, a in world.legit.items() if world.job_of[a] == self.name), default=0)
        lost = any(s > own and world.job_of[a] != self.name for s, a in world.legit.items())
        world.expect(lost, "CONFLICT", f"{self.name} is told that it lost, and nobody else committed")
        world.count["conflicts"] += 1

    def closed(self) -> None:
        for error in self.failures:
            if isinstance(error, SaveError):
                times = sum(t is error for t in self.told)
                self.world.expect(times == 1, "TOLD", f"{self.name}: {error!r} was raised {times} times")


class Meeting:
    """A Coordinator: ranks wait for each other by giving the turn away."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.world_size = rank.number, rank.of
        self._job = rank.job
        self._met = 0

    def meet(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        if len(self._job.meetings) == self._met:
            self._job.meetings.append({})
        reports = self._job.meetings[self._met]
        self._met += 1
        reports[self.rank] = json.dumps(report)
        if len(reports) < self.world_size:
            turns.turns.pause(lambda: len(reports) == self.world_size)
        return [json.loads(reports[rank]) for rank in range(self.world_size)]


class Rank:
    """One process of a job."""

    def __init__(self, job: Job, number: int, of: int) -> None:
        self.job, self.world, self.number, self.of = job, job.world, number, of
        self.name = f"{job.name}, rank {number}"
        self.model = Model(number, of)
        self.meeting = Meeting(self)
        self.steps = 0
        self.decided = 0
        self.resuming = False
        self.wanted: int | None = None
        self.handle: flight.SaveHandle | None = None
        self.attempt = ""
        self.faults_before = 0

    def main(self) -> None:
        try:
            self.open()
            if self.resume(self.job.wanted_step):
                while not self.decide(lambda: self.world.quiet):
                    self.turn()
                self.finish()
                self.close()
                return
        except ConflictError:
            self.job.told_of_conflict()
            self.close()
        except NotFoundError as error:
            self.world.expect(self.wanted is not None, "READ", f"the newest is not found: {error!r}")
        except StorageError:
            pass
        self.world.end(self.job, but=self.name)

    def decide(self, draw: Callable[[], Any]) -> Any:
        """The same answer on every rank, given by the first that asks."""
        decisions = self.job.decisions
        if len(decisions) == self.decided:
            decisions.append(draw())
        self.decided += 1
        return decisions[self.decided - 1]

    def open(self) -> None:
        self.checkpointer = Checkpointer(
            self.model,  # type: ignore[arg-type]
            SharedStore(self.world.memory, self.through),
            state={"reader": self.model},
            settings=self.world.mix.settings,
            clock=self.world.clock,
        )
        atexit.unregister(self.checkpointer.close)
        self.job.id = self.checkpointer._resume._job

    def through(self, op: Op, perform: Perform) -> Any:
        tries = self.world.mix.tries if op.kind != "list" else 1
        for attempt in range(tries):
            try:
                return self.world.through(op, perform, self)
            except StorageError:
                if attempt + 1 == tries:
                    raise
        raise AssertionError

    def resume(self, step: int | None) -> bool:
        """False if this process ends here."""
        world, job = self.world, self.job
        newest_before = max(world.legit, default=0)
        self.resuming, self.wanted = True, step
        try:
            progress = self.checkpointer.resume_from_checkpoint(step)
        except CorruptionError as error:
            if self.number == 0:
                world.judge_corruption(error, step, job.id)
            return False
        finally:
            self.resuming = False
        if progress is None:
            world.expect(not newest_before or self.number != 0, "READ", "an old store is called empty")
            return True
        attempt = world.verify(progress.seq, {**self.model.snapshot(), "step": progress.step})
        self.steps = progress.step
        if self.number != 0:
            return True
        marker = max(world.markers(job.id), key=lambda m: m.n)
        world.expect(
            marker.seq == progress.seq, "MARKER", f"{job.name} resumed {progress.seq}, its marker says {marker.seq}"
        )
        if step is None:
            world.expect(
                marker.newest >= newest_before, "READ", f"{marker.newest} was taken for the newest, not {newest_before}"
            )
            newest = world.legit[marker.newest]
            world.expect(
                attempt in (*world.trail[newest], newest), "READ", f"{progress.seq} is no ancestor of {marker.newest}"
            )
            whole = progress.seq == marker.newest or bool(world.damaged)
            world.expect(whole, "READ", "a whole checkpoint was passed over")
            world.count["fallbacks"] += progress.seq != marker.newest
        job.trail, job.own = (*world.trail[attempt], attempt), []
        world.count["resumes"] += 1
        world.count["resharded"] += world.manifests[progress.seq].world_size != self.of
        return True

    def train(self) -> None:
        batch, value = self.decide(self.world.batch)
        self.model.train(batch, value, self.world.pause)
        self.steps += 1

    def turn(self) -> None:
        job = self.job
        for _ in range(self.decide(lambda: self.world.rng.choice((1, 1, 2)))):
            self.train()
            self.world.pause()
        deed = self.decide(self.next_deed)
        try:
            if deed[0] == "resume":
                if not self.resume(deed[1]):
                    raise StorageError("this process ends")
            elif deed[0] == "wait" and self.handle is not None and not any(self.handle._error is t for t in job.told):
                self.handle.wait()
            elif deed[0] == "save":
                self.save(deed[1])
        except SaveError as error:
            self.tell(error)

    def next_deed(self) -> tuple[str, Any]:
        world, rng = self.world, self.world.rng
        if self.job.busy and rng.random() < 0.9:
            return "train", None
        if world.legit and rng.random() < world.mix.resume_again:
            return "resume", world.wanted()
        if rng.random() < 0.1:
            return "wait", None
        return "save", rng.choice(world.mix.kinds)

    def save(self, kind: str) -> None:
        world, job = self.world, self.job
        faults_before = job.faults
        try:
            handle = self.checkpointer.save_checkpoint(self.steps, kind=kind)  # type: ignore[arg-type]
        except SaveError as error:
            known = any(error is f for f in job.failures) or self.number != 0
            world.expect(known or job.faults > faults_before or bool(world.damaged), "TOLD", f"no cause for {error!r}")
            raise
        begun = self.checkpointer._saver._flight
        assert begun is not None
        self.handle, self.attempt, self.faults_before = handle, begun.attempt.attempt, job.faults
        part = {**self.model.snapshot(), "step": self.steps}
        others = [world.oracle[self.attempt]] if self.attempt in world.oracle else []
        world.oracle[self.attempt] = united([*others, part])
        world.job_of[self.attempt] = job.name
        if not others:
            world.trail[self.attempt] = (*job.trail, *job.own)
            job.own.append(self.attempt)

    def carried_out(self) -> None:
        """The background thread is done with the attempt."""
        world, job, handle = self.world, self.job, self.handle
        assert handle is not None
        world.turns.alive()
        if not handle.done():
            world.expect(self.number != 0, "LIVE", "an attempt ended and its handle is not done")
            return
        if (error := handle._error) is None:
            world.acknowledge(handle.seq, self.attempt, self.name)
            return
        excused = job.faults > self.faults_before or handle.seq in world.legit or bool(world.damaged) or self.of > 1
        world.expect(excused, "TOLD", f"{self.name}: a save failed without a cause: {error!r}")
        if self.number == 0:
            job.failures.append(error)

    def tell(self, error: Exception) -> None:
        if self.number == 0:
            self.job.told.append(error)

    def finish(self) -> None:
        for _ in range(3):
            self.train()
            try:
                self.save(self.decide(lambda: self.world.rng.choice(self.world.mix.kinds)))
                assert self.handle is not None
                self.handle.wait()
            except SaveError as error:
                self.tell(error)
                done = False
            else:
                done = True
            if self.decide(lambda done=done: done):
                return
        self.world.expect(bool(self.world.damaged), "LIVE", f"{self.name} cannot save any more: {self.job.told[-1:]!r}")

    def close(self) -> None:
        try:
            self.checkpointer.close()
        except ConflictError:
            self.job.told_of_conflict()
        except SaveError as error:
            self.tell(error)
        if self.number == 0:
            self.job.closed()
