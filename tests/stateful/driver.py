"""The schedules of protocol_model.py driven through the real code: jobs of one and two ranks, readers, crashes, lost and late writes, damage, and an oracle.

A run is a function of its seed. Jobs use the real Checkpointer over a store in memory; each store operation of each of their threads waits
until the scheduler lets it happen. What is checked, after every write and at the end of the run:

  I1, I3   every visible checkpoint can be read in full
  I2       no key gets other bytes
  I4       one commit for each number, without gaps, and only by the job that owns the number
  I5 I6 I7 I8  a checkpoint reads as exactly the state of the save call: rows, row states, dense state, reader, step
  ACK      an acknowledged commit is in the store, and stays visible
  CONFLICT is reported only to a job that lost
  PARENT   a delta counts from what the manifest before it names as next parent; a branch starts with a base
  LINEAGE  a job extends the lineage of the newest checkpoint that it saw
  MARKER   a resume says so in the store before it reads any row
  READ     a reader gets a right state that is not outdated, or CorruptionError if something is damaged; a fallback is a true ancestor
  TOLD     each failed save is raised exactly once, and none fails without a cause
  LIVE     once faults end, a job saves at its second try or learns that it lost, and a resume gets the newest at once
"""

from __future__ import annotations

import atexit
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import turns
from turns import Actor, Inline, TurnCondition, TurnEvent, Violation, begin_run

from incremental_ckpt import checkpointer, flight, planning, restore, resuming, saving, stream
from incremental_ckpt.checkpointer import Checkpointer
from incremental_ckpt.errors import CheckpointError, ConflictError, CorruptionError, NotFoundError, SaveError, StorageError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Manifest, RankManifest
from incremental_ckpt.model import Field, Shard, Table
from incremental_ckpt.repository import Repository
from incremental_ckpt.settings import Settings
from incremental_ckpt.storage.memory import MemoryStore
from incremental_ckpt.testing import Crash, FaultStore, Op, Perform

TABLES = (("wide", 4, True), ("narrow", 3, True), ("whole", 1, False))
FIELDS = (Field("weight", "int64", 1), Field("momentum", "int64", 1))
WRITES = ("put", "put_if_absent", "delete")
State = dict[str, Any]
"""By ``table.field`` the value of each row; else what the thing is called."""


class Model:
    """A ModelAdapter of its own, and a reader: tables whose updates can be interrupted half way, a dense tensor, a position.

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

    def state(self) -> State:
        return {"dense": {"weight": self.dense}, "optimizer": {}, "fused": [], "replicated": ("weight",)}

    def load_state(self, state: Mapping[str, Any], *, strict: bool = True) -> list[str]:
        self.dense.copy_(state["dense"]["weight"])
        return []

    def prepare_restore(self, fields: object) -> Sequence[Table]:
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


@dataclass
class Mix:
    """How likely things are in one run; each seed has its own mixture (swarm testing)."""

    ranks: Sequence[int] = (1,)
    lost_answers: float = 0.02
    lost_commits: float = 0.06
    failed_reads: float = 0.0
    fates: Sequence[str] = ("now", "late", "late", "never")
    tries: int = 1
    stall: float = 0.004
    crash: float = 0.004
    late: float = 0.02
    reader: float = 0.004
    damage: float = 0.0
    damage_manifests: bool = False
    older: float = 0.3
    rival: float = 0.0
    resume_again: float = 0.0
    kinds: Sequence[str] = ("full", "consecutive", "consecutive", "one-shot", "one-shot", "intermittent")
    pauses_in_copies: bool = False
    settings: Settings = field(default_factory=Settings)

    @classmethod
    def drawn(cls, rng: random.Random, focus: int) -> Mix:
        mix = cls(
            ranks=rng.choice(((1,), (1,), (2,), (1, 2))),
            lost_answers=rng.choice((0.0, 0.01, 0.04, 0.15)),
            lost_commits=rng.choice((0.0, 0.05, 0.1, 0.3)),
            failed_reads=rng.choice((0.0, 0.0, 0.0, 0.02)),
            tries=rng.choice((1, 1, 2)),
            stall=0.004 * rng.choice((0, 1, 3)),
            crash=0.004 * rng.choice((0.3, 1, 2)),
            late=0.02 * rng.choice((0.3, 1, 3)),
            reader=0.01 * rng.choice((0, 0.5, 1)),
            kinds=rng.choice(
                (cls.kinds, ("full", "one-shot"), ("consecutive", "one-shot"), ("consecutive",), ("one-shot",))
            ),
            pauses_in_copies=rng.random() < 0.5,
            settings=Settings(
                pack_bytes=rng.choice((1, 128, 256, 1024)),
                entry_bytes=rng.choice((8, 8, 16, 64)),
                snapshot_bytes=rng.choice((1, 1 << 20, 1 << 20)),
                preimage_bytes=rng.choice((1, 48, 1 << 20, 1 << 20)),
                stream=rng.random() < 0.8,
                read_threads=1,
                vote_timeout=rng.choice((0.03, 0.3)),
                idle_priority=False,
            ),
        )
        if focus == 0:
            mix.damage, mix.damage_manifests, mix.crash, mix.older = 0.02, rng.random() < 0.3, 0.01, 0.6
            mix.ranks = rng.choice(((1,), (1,), (2,)))
            mix.kinds = ("full", "full", "consecutive", "one-shot")
        if focus == 1:
            mix.crash, mix.rival = 0.012, 0.01
        if focus == 2:
            mix.stall, mix.lost_answers, mix.lost_commits = 0.02, 0.1, 0.3
        if focus == 3:
            mix.fates, mix.lost_answers, mix.late, mix.crash = ("late",), 0.1, 0.03, 0.001
            mix.lost_commits = 0.3
        if focus == 4:
            mix.resume_again, mix.lost_answers, mix.lost_commits, mix.fates = 0.3, 0.0, 0.3, ("late",)
            mix.ranks, mix.late = rng.choice(((1,), (1,), (2,))), 0.05
        return mix


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
        except (NotFoundError, StorageError):
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
        self.resuming = True
        try:
            progress = self.checkpointer.resume_from_checkpoint(step)
        except CorruptionError as error:
            if self.number == 0:
                world.judge_corruption(error, step)
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
        world.expect(marker.seq == progress.seq, "MARKER", f"{job.name} resumed {progress.seq}, its marker says {marker.seq}")
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
        job, mix = self.job, self.world.mix
        for _ in range(self.decide(lambda: self.world.rng.choice((1, 1, 2)))):
            self.train()
            self.world.pause()
        deed = self.decide(self.next_deed)
        try:
            if deed[0] == "resume":
                if not self.resume(deed[1]):
                    raise NotFoundError("this process ends")
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


@dataclass(frozen=True)
class Tool:
    """A process beside the jobs, started with some chance at each event: ``body(world, store)``."""

    name: str
    chance: Callable[[Mix], float]
    body: Callable[[World, SharedStore], None]


def read(world: World, store: SharedStore) -> None:
    """Reads the newest checkpoint, or one of a step, and proves what there is."""
    repository = Repository(store)
    before = max(world.legit, default=0)
    step = world.wanted()
    try:
        seq = repository.resolve(None) if step is None else repository.find(step).seq
        found = {
            f"{t}.{f.name}": dict(enumerate(repository.read_table(t, seq, field=f.name).ravel().tolist()))
            for t, _, _ in TABLES
            for f in FIELDS
        }
    except NotFoundError:
        world.expect(not before, "READ", "an old store is called empty")
        return
    except CorruptionError as error:
        world.expect(bool(world.damaged), "READ", f"an undamaged store is called corrupt: {error!r}")
        return
    world.expect(step is not None or seq >= before, "READ", f"{seq} was taken for the newest, not {before}")
    world.verify(seq, found)
    if world.rng.random() < 0.3:
        report = repository.check(deep=True)
        world.expect(report.ok or bool(world.damaged), "READ", f"an undamaged store has problems: {report.problems}")
    world.count["reads"] += 1


TOOLS = (Tool("reader", lambda mix: mix.reader, read),)


class World:
    """The scheduler, the store, the faults and the oracle of one run.

    Args:
        die_at: the job whose write is the ``die_at``-th of the run dies at it, after it ``landed`` or before.
    """

    def __init__(
        self,
        seed: int,
        *,
        die_at: int = 0,
        landed: bool = False,
        mix: Mix | None = None,
        tools: Sequence[Tool] = TOOLS,
        count: Counter[str] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.mix = mix or Mix.drawn(self.rng, seed % 6)
        self.tools = tools
        self.die_at, self.landed = die_at, landed
        self.memory = MemoryStore()
        self.turns = begin_run()
        self.jobs: list[Job] = []
        self.late: list[tuple[Op, Perform, Rank | None]] = []
        self.log: list[str] = []
        self.ids, self.ticks = iter(range(1, 1 << 60)), iter(range(1, 1 << 60))
        self.faults, self.quiet, self.writes, self.now = True, False, 0, 0.0
        self.oracle: dict[str, State] = {}
        self.trail: dict[str, tuple[str, ...]] = {}
        self.job_of: dict[str, str] = {}
        self.legit: dict[int, str] = {}
        self.manifests: dict[int, Manifest] = {}
        self.acknowledged: list[tuple[int, str]] = []
        self.dropped: set[int] = set()
        self.damaged: set[str] = set()
        self.count = count if count is not None else Counter()

    # -- what real code is handed

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def new_id(self) -> str:
        return f"{next(self.ids):016x}"

    def sleep(self, _seconds: float) -> None:
        self.pause()

    def batch(self) -> tuple[dict[str, list[int]], int]:
        rows = {name: sorted(self.rng.sample(range(n), self.rng.choice((0, 1, 1, min(2, n))))) for name, n, _ in TABLES}
        return rows, next(self.ticks)

    def pause(self) -> None:
        self.turns.pause()

    def through(self, op: Op, perform: Perform, rank: Rank | None) -> Any:
        """A store operation of an actor: it happens when the scheduler lets it, or not, or late."""
        self.pause()
        if self.turns.current is None:
            return perform(op)
        if rank is not None and rank.resuming and self.turns.current.name == rank.name:
            marked = not (op.kind == "get" and op.key.startswith(layout.DATA)) or bool(self.markers(rank.job.id))
            self.expect(marked, "MARKER", f"{rank.name} reads {op.key} before the resume is marked")
        if op.kind not in WRITES:
            if rank is not None and self.faults and self.rng.random() < self.mix.failed_reads:
                rank.job.faults += 1
                raise StorageError(f"injected: no answer to {op}", retryable=True)
            return perform(op)
        self.writes += 1
        op = replace(op, parts=[bytes(part) for part in op.parts])
        if self.writes == self.die_at and rank is not None:
            if self.landed:
                self.apply(op, perform)
            self.crash(rank.job, rank)
            raise Crash(op.key)
        lost = self.mix.lost_commits if op.key.startswith(layout.MANIFESTS) else self.mix.lost_answers
        if rank is not None and self.faults and self.rng.random() < lost:
            fate = self.rng.choice(self.mix.fates)
            self.log.append(f"no answer ({fate}) to {rank.name}: {op.key}")
            rank.job.faults += 1
            if fate == "now":
                self.apply(op, perform)
            elif fate == "late":
                self.late.append((op, perform, rank))
            raise StorageError(f"injected: no answer to {op}", retryable=True)
        return self.apply(op, perform)

    def apply(self, op: Op, perform: Perform) -> Any:
        before = self.stored(op.key)
        value = b"".join(bytes(part) for part in op.parts)
        if op.kind == "put" and before is not None:
            self.expect(before == value or op.key in self.damaged, "I2", f"{op.key} is overwritten")
        answer = perform(op) if before != value or op.kind != "put" else None
        if op.kind == "delete" or before is None:
            self.count["writes"] += 1
            self.written(op.key, value)
        return answer

    # -- the oracle

    def expect(self, holds: bool, name: str, text: str) -> None:
        if not holds:
            # Noted at once: code on the way up may hold it for a failure of its own.
            self.turns.violation = self.turns.violation or Violation(f"{name}: {text}")
            raise self.turns.violation

    def stored(self, key: str) -> bytes | None:
        return self.memory._objects.by_key.get(key)

    def repository(self) -> Repository:
        """A view that nobody schedules and that remembers nothing."""
        return Repository(self.memory)

    def written(self, key: str, value: bytes) -> None:
        self.log.append(key)
        parsed = layout.parse_key(key)
        self.expect(parsed is not None, "FORMAT", f"{key} is no key of the format")
        assert parsed is not None
        if parsed.what == "manifest" and self.stored(key) is not None:
            self.committed(Manifest.from_bytes(value, key))
        elif parsed.what in ("base", "gone") or self.stored(key) is None:
            for seq in self.repository().listing().seqs:
                self.check(seq)

    def committed(self, manifest: Manifest) -> None:
        seq, attempt = manifest.seq, manifest.attempt
        self.log[-1] += f" {manifest.kind} by {self.job_of[attempt]} of step {manifest.step} on {manifest.parent and manifest.parent.seq}"
        self.expect(seq == max(self.legit, default=0) + 1, "I4", f"{seq} follows {max(self.legit, default=0)}")
        self.legit[seq], self.manifests[seq] = attempt, manifest
        self.count["commits"] += 1
        self.count[manifest.kind] += 1
        self.check_structure(manifest)
        self.check(seq)

    def check_structure(self, manifest: Manifest) -> None:
        begun = manifest.lineage[-1]
        before = self.manifests[begun.first - 1].lineage if begun.first > 1 else ()
        unreadable = layout.manifest_key(begun.first - 1) in self.damaged if begun.first > 1 else False
        self.expect(unreadable or manifest.lineage[:-1] == before, "LINEAGE", f"{manifest.lineage} of {manifest.seq} does not extend {before}")
        self.expect(begun.job == manifest.job, "LINEAGE", f"{manifest.seq} is of another job than its lineage says")
        self.expect(bool(begun.resumed) or begun.first == 1, "LINEAGE", f"{manifest.seq} is of a job that found nothing, behind others")
        own = [m for m in self.manifests.values() if begun.first <= m.seq < manifest.seq]
        self.expect(all(m.job == manifest.job for m in own), "I4", f"{manifest.seq} is among the numbers of another job")
        if manifest.parent is None:
            return
        if own:
            last = own[-1]
            parent = last.next_parent.seq if last.next_parent else last.seq
        else:
            parent = begun.resumed
            self.expect(parent == begun.first - 1, "PARENT", f"the branch from {parent} starts with a delta ({manifest.seq})")
        self.expect(manifest.parent.seq == parent, "PARENT", f"{manifest.seq} counts from {manifest.parent.seq}, not from {parent}")

    def check(self, seq: int) -> None:
        """I1, I3, I6 to I8 of one visible checkpoint, all of it read anew."""
        repository = self.repository()
        try:
            model = Model()
            found = restore.find(repository, repository.links(seq), model.tables())
            state = restore.load_state(repository, found)
            restore.load_tables(repository, found, model.tables(), threads=1)
        except (CorruptionError, NotFoundError) as error:
            self.expect(bool(self.damaged), "I1", f"seq {seq} is visible and cannot be read: {error!r}")
            return
        model.load_state(state)
        model.load_state_dict(state["user"]["reader"])
        self.verify(seq, {**model.snapshot(), "step": self.manifests[seq].step})

    def verify(self, seq: int, found: State) -> str:
        """What somebody read is what the save of that number was given; the attempt that it was."""
        self.expect(seq in self.legit, "READ", f"seq {seq} was read, which nobody committed")
        attempt = self.legit[seq]
        expected = self.oracle[attempt]
        wrong = {
            name: (value, expected[name])
            for name, value in found.items()
            if (value.items() - expected[name].items() if "." in name else value != expected[name])
        }
        self.expect(not wrong, "I6", f"seq {seq} reads as another state (found, expected): {wrong}")
        return attempt

    def acknowledge(self, seq: int, attempt: str, who: str) -> None:
        self.expect(self.legit.get(seq) == attempt, "ACK", f"{who} believes that {attempt} is seq {seq}, which is {self.legit.get(seq)}")
        self.acknowledged.append((seq, attempt))
        self.count["acknowledged"] += 1

    def markers(self, job: str) -> list[Any]:
        return [m for m in self.repository().resume_markers() if m.job == job]

    def judge_corruption(self, error: CorruptionError, step: int | None) -> None:
        self.expect(bool(self.damaged), "READ", f"an undamaged store is called corrupt: {error!r}")
        self.count["given up"] += 1
        if step is not None or any(key.startswith(layout.MANIFESTS) for key in self.damaged):
            return
        newest = self.legit[max(self.legit)]
        whole = self.repository().check(deep=True).restorable
        left = [s for s in whole if self.legit[s] in self.trail[newest]]
        self.expect(not left, "READ", f"given up although the ancestors {left} of {max(self.legit)} are whole: {error!r}")

    def wanted(self) -> int | None:
        """Which step to ask for; None: the newest."""
        if self.rng.random() >= self.mix.older or not self.legit:
            return None
        step: int = self.oracle[self.legit[self.rng.choice(sorted(self.legit)[-4:])]]["step"]
        return step

    # -- events

    def crash(self, job: Job, rank: Rank | None = None) -> None:
        """The job dies; with some luck the background threads of the ranks other than ``rank`` go on for a while."""
        self.log.append(f"crash of {job.name}")
        self.count["crashes"] += 1
        self.end(job, outlives=len(job.ranks) > 1 and self.dice(0.3), dead=rank or self.rng.choice(job.ranks))

    def end(self, job: Job, *, but: str = "", outlives: bool = False, dead: Rank | None = None) -> None:
        for actor in self.turns.actors:
            if actor.group is not job or actor.name == but:
                continue
            background = actor.name.endswith("background")
            if not (outlives and background and dead is not None and not actor.name.startswith(dead.name)):
                actor.kill()
        if job in self.jobs:
            self.jobs.remove(job)

    def start(self) -> None:
        job = Job(self, f"job {self.count['jobs']}", self.wanted(), self.rng.choice(self.mix.ranks))
        self.count["jobs"] += 1
        self.log.append(f"{job.name} of {len(job.ranks)} ranks starts, wants {job.wanted_step or 'the newest'}")
        self.jobs.append(job)
        for rank in job.ranks:
            self.turns.spawn(rank.name, rank.main, job, self.rng.choice((3, 9, 20)))

    def damage(self) -> None:
        newest = max(self.legit)
        base = max(m.seq for m in self.manifests.values() if m.kind == "base")
        keys = [layout.attempt_prefix(seq, self.legit[seq]) for seq in {newest, self.rng.choice((newest, base))}]
        objects = self.memory._objects.by_key
        found = sorted(k for k in objects if any(k.startswith(p) for p in keys))
        if self.mix.damage_manifests:
            found.append(layout.manifest_key(newest))
        key = self.rng.choice(found)
        raw = bytearray(objects[key])
        raw[self.rng.randrange(len(raw))] ^= 1 << self.rng.randrange(8)
        objects[key] = bytes(raw)
        self.damaged.add(key)
        self.count["damaged"] += 1
        self.log.append(f"damage to {key}")
        self.mix.older = 0.0
        for job in list(self.jobs) if self.dice(0.8) else ():
            self.crash(job)  # so that somebody reads it

    def newest_branches_off(self) -> bool:
        newest = self.manifests[max(self.manifests)]
        return newest.lineage[-1].first == newest.seq != newest.lineage[-1].resumed + 1

    def land(self, index: int) -> None:
        op, perform, rank = self.late.pop(index)
        self.log.append(f"late, of {rank.name if rank else 'a tool'}:")
        try:
            self.apply(op, perform)
        except ConflictError:
            pass  # the dead do not hear that they were refused

    def dice(self, chance: float) -> bool:
        return self.rng.random() < chance

    def event(self) -> None:
        mix, alive = self.mix, {id(a.group) for a in self.turns.actors if not a.name.endswith("background")}
        self.jobs = [j for j in self.jobs if id(j) in alive]
        awake = [a for a in self.turns.actors if a.runnable and not (isinstance(a.group, Job) and a.group.asleep)]
        if all(j.asleep for j in self.jobs) and len(self.oracle) < 30:
            self.start()
        elif self.jobs and self.dice(mix.stall):
            job = self.rng.choice(self.jobs)
            job.asleep = not job.asleep
            self.log.append(f"{job.name} {'stalls' if job.asleep else 'wakes'}")
        elif self.jobs and self.dice(mix.crash):
            self.crash(self.rng.choice(self.jobs))
        elif len(self.jobs) < 3 and self.dice(mix.rival):
            self.start()
        elif self.late and self.dice(mix.late):
            self.land(self.rng.randrange(len(self.late)))
        elif len(self.legit) > 2 and not self.damaged and self.dice(mix.damage * (10 if self.newest_branches_off() else 1)):
            self.damage()
        elif tool := next((t for t in self.tools if self.dice(t.chance(mix))), None):
            self.run_tool(tool)
        elif awake:
            self.step(awake)

    def run_tool(self, tool: Tool) -> Actor:
        store = SharedStore(self.memory, lambda op, perform: self.through(op, perform, None))
        return self.turns.spawn(tool.name, lambda: tool.body(self, store), None, self.rng.choice((1, 3, 9)))

    def step(self, actors: Sequence[Actor]) -> None:
        self.rng.choices(actors, [a.speed for a in actors])[0].step()
        self.turns.bury()

    def run(self, events: int = 350) -> World:
        """Raises Violation."""
        try:
            for _ in range(events):
                self.event()
                self.turns.bury()
            self.settle()
        finally:
            self.turns.kill_all()
        return self

    def settle(self) -> None:
        """Faults end, sleepers wake, everybody comes to an end; then the newest is there at once."""
        self.faults, self.quiet = False, True
        while self.turns.actors:
            runnable = [a for a in self.turns.actors if a.runnable]
            self.expect(bool(runnable), "HANG", f"{[a.name for a in self.turns.actors]} wait for each other")
            self.step(runnable)
            if self.late and self.dice(0.01):
                self.land(self.rng.randrange(len(self.late)))
        visible = self.repository().listing().seqs
        for seq, attempt in self.acknowledged:
            self.expect(seq in self.dropped or (seq in visible and self.legit[seq] == attempt), "ACK", f"seq {seq} is lost")
        for seq in visible if self.dropped else visible[-1:]:
            self.check(seq)
        if self.legit and not self.damaged:
            last = Job(self, "the last", None, 1).ranks[0]
            last.open()
            last.resume(None)
            self.expect(last.steps == self.oracle[self.legit[max(self.legit)]]["step"], "LIVE", "not the newest")
            report = self.repository().check(deep=True)
            self.expect(report.ok, "READ", f"an undamaged store has problems: {report.problems}")


class _Background:
    """In the place of flight.Background: each job that it is given is an actor."""

    def __init__(self, *, idle: bool) -> None:
        self._rank = current_rank()

    def submit(self, work: Callable[[], None]) -> None:
        rank = self._rank

        def carry_out() -> None:
            work()
            rank.carried_out()

        name, speed = f"{rank.name}, background", rank.world.rng.choice((3, 9, 20))
        turns.turns.spawn(name, carry_out, rank.job, speed)

    def stop(self) -> None:
        pass


def current_rank() -> Rank:
    """The one whose thread has the turn, or the one that a settled world resumes last."""
    world, actor = _worlds[-1], turns.turns.current
    if actor is None:
        return Job(world, "the last", None, 1).ranks[0]
    return next(r for r in actor.group.ranks if actor.name.startswith(r.name))


_worlds: list[World] = []


def _remembering(parse: Callable[[bytes, str], Any]) -> Callable[[bytes | memoryview, str], Any]:
    parsed: dict[tuple[bytes, str], Any] = {}

    def remembered(raw: bytes | memoryview, key: str) -> Any:
        entry = bytes(raw), key
        if entry not in parsed:
            if len(parsed) > 1000:
                parsed.clear()
            parsed[entry] = parse(*entry)
        return parsed[entry]

    return remembered


@contextmanager
def real_code_under_the_scheduler() -> Iterator[None]:
    """Replace what waits, draws and looks at the clock. The rest is the real code."""
    copy_chunk = stream.RowStream._copy_chunk

    def copy_chunk_and_pause(self: Any, *arguments: Any) -> None:
        world = _worlds[-1]
        copy_chunk(self, *arguments)
        if world.mix.pauses_in_copies:
            world.pause()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flight, "threading", SimpleNamespace(Event=TurnEvent))
        patch.setattr(saving, "Flight", lambda *facts: flight.Flight(*facts, interrupt=TurnEvent(), written=TurnEvent()))
        patch.setattr(saving, "Persister", partial(saving.Persister, sleep=lambda seconds: _worlds[-1].sleep(seconds)))
        patch.setattr(stream, "threading", SimpleNamespace(Condition=TurnCondition))
        patch.setattr(saving, "Background", _Background)
        patch.setattr(restore, "ThreadPoolExecutor", Inline)
        patch.setattr(stream.RowStream, "_copy_chunk", copy_chunk_and_pause)
        patch.setattr(checkpointer, "coordinator", lambda timeout: current_rank().meeting)
        for module in (planning, checkpointer):
            patch.setattr(module, "new_id", lambda: _worlds[-1].new_id())
        patch.setattr(checkpointer, "adapt", lambda model, optimizer: model)
        patch.setattr(checkpointer, "capture_rng", dict)
        patch.setattr(checkpointer, "describe", lambda world_size: {})
        patch.setattr(resuming, "restore_rng", lambda state: None)
        # Parsing is a pure function of the bytes, and by far the most of a run's time.
        for document in (Manifest, RankManifest):
            patch.setattr(document, "from_bytes", _remembering(document.from_bytes))
        log = logging.getLogger("incremental_ckpt")
        patch.setattr(log, "disabled", True)
        yield


def run(seed: int, *, events: int = 350, **options: Any) -> World:
    """One run, see World. Raises Violation with the schedule that led to it."""
    world = World(seed, **options)
    _worlds[:] = [world]
    world.count["runs"] += 1
    try:
        return world.run(events)
    except Violation as violation:
        violation.add_note(f"seed {seed}\n  " + "\n  ".join(world.log))
        raise
