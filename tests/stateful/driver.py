"""The schedules of protocol_model.py driven through the real code: jobs, readers, crashes, lost and late writes, damage, and an oracle.

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
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import schedule
import torch
from schedule import Actor, Inline, TurnCondition, TurnEvent, Violation, begin_run

from incremental_ckpt import checkpointer, restore, resuming, saving, stream
from incremental_ckpt.checkpointer import Checkpointer
from incremental_ckpt.errors import ConflictError, CorruptionError, NotFoundError, SaveError, StorageError
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


class Model:
    """A ModelAdapter of its own: tables whose updates can be interrupted half way, a dense tensor, and a reader's position."""

    def __init__(self) -> None:
        self._tables = [
            Table(
                Shard(name, rows, 1, 0, rows, 0, 1, FIELDS),
                {f.name: torch.zeros((rows, 1), dtype=torch.int64) for f in FIELDS},
                tracked,
            )
            for name, rows, tracked in TABLES
        ]
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
        return {"dense": {"weight": self.dense}}

    def load_state(self, state: State) -> None:
        self.dense.copy_(state["dense"]["weight"])

    def prepare_restore(self, fields: object) -> Sequence[Table]:
        return self._tables

    def state_dict(self) -> State:
        return {"position": self.position}

    def load_state_dict(self, state: State) -> None:
        self.position = state["position"]

    def train(self, rng: random.Random, value: int, pause: Callable[[], None]) -> None:
        for index, table in enumerate(self._tables):
            rows = torch.tensor(sorted(rng.sample(range(table.shard.rows), rng.choice((0, 1, 1, min(2, table.shard.rows))))))
            if not rows.numel():
                continue
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
        found: State = {
            f"{t.shard.table}.{name}": live.ravel().tolist() for t in self._tables for name, live in t.tensors.items()
        }
        return {**found, "dense": self.dense.tolist(), "position": self.position}


@dataclass
class Mix:
    """How likely things are in one run; each seed has its own mixture (swarm testing)."""

    lost_answers: float = 0.02
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
            lost_answers=rng.choice((0.0, 0.01, 0.04, 0.15)),
            failed_reads=rng.choice((0.0, 0.0, 0.0, 0.02)),
            tries=rng.choice((1, 1, 2)),
            stall=0.004 * rng.choice((0, 1, 3)),
            crash=0.004 * rng.choice((0.3, 1, 2)),
            late=0.02 * rng.choice((0.3, 1, 3)),
            reader=0.01 * rng.choice((0, 0.5, 1)),
            kinds=rng.choice((cls.kinds, ("full", "one-shot"), ("consecutive", "one-shot"), ("consecutive",), ("one-shot",))),
            pauses_in_copies=rng.random() < 0.5,
            settings=Settings(
                pack_bytes=rng.choice((1, 128, 256, 1024)),
                entry_bytes=rng.choice((8, 8, 16, 64)),
                snapshot_bytes=rng.choice((1, 1 << 20, 1 << 20)),
                preimage_bytes=rng.choice((1, 48, 1 << 20, 1 << 20)),
                stream=rng.random() < 0.8,
                read_threads=1,
                idle_priority=False,
            ),
        )
        if focus == 0:
            mix.damage, mix.damage_manifests, mix.crash, mix.older = 0.01, rng.random() < 0.3, 0.01, 0.6
            mix.kinds = ("full", "full", "consecutive", "one-shot")
        if focus == 1:
            mix.crash, mix.rival = 0.012, 0.01
        if focus == 2:
            mix.stall, mix.lost_answers = 0.02, 0.15
        if focus == 3:
            mix.fates, mix.lost_answers, mix.late, mix.crash = ("late",), 0.2, 0.03, 0.001
        if focus == 4:
            mix.resume_again, mix.lost_answers, mix.fates = 0.2, 0.1, ("late",)
        return mix


class SharedStore(FaultStore):
    """One process's handle on the store that outlives it."""

    def close(self) -> None:
        pass


class Job:
    """A training process: resumes, trains, saves in the background, until it dies, loses or is told to end."""

    def __init__(self, world: World, name: str, step: int | None) -> None:
        self.world, self.name, self.wanted_step = world, name, step
        self.rng = world.rng
        self.model = Model()
        self.id = ""
        self.steps = 0
        self.trail: tuple[str, ...] = ()
        self.own: list[str] = []
        self.asleep = False
        self.faults = 0
        self.resuming = False
        self.handle: saving.SaveHandle | None = None
        self.attempt = ""
        self.failures: list[Exception] = []
        self.told: list[Exception] = []
        self.faults_before = 0

    def main(self) -> None:
        try:
            self.open()
        except StorageError:
            return
        try:
            if not self.resume(self.wanted_step):
                return
            while not self.world.quiet:
                self.turn()
            self.finish()
        except ConflictError:
            self.told_of_conflict()
        except (NotFoundError, StorageError):
            return
        self.close()

    def open(self) -> None:
        self.checkpointer = Checkpointer(
            self.model,  # type: ignore[arg-type]
            SharedStore(self.world.memory, self.through),
            state={"reader": self.model},
            settings=self.world.mix.settings,
            clock=self.world.clock,
        )
        atexit.unregister(self.checkpointer.close)
        self.id = self.world.ids[-1]

    def through(self, op: Op, perform: Perform) -> Any:
        for attempt in range(self.world.mix.tries):
            try:
                return self.world.through(op, perform, self)
            except StorageError:
                if attempt + 1 == self.world.mix.tries or op.kind == "list":
                    raise
        raise AssertionError

    def resume(self, step: int | None) -> bool:
        """False if this process ends here."""
        world = self.world
        newest_before = max(world.legit, default=0)
        self.resuming, self.wanted_step = True, step
        try:
            progress = self.checkpointer.resume_from_checkpoint(step)
        except CorruptionError as error:
            world.judge_corruption(error, step)
            return False
        finally:
            self.resuming = False
        if progress is None:
            world.expect(not newest_before, "READ", "an old store is called empty")
            return True
        attempt = world.verify(progress.seq, {**self.model.snapshot(), "step": progress.step})
        marker = max(world.markers(self.id), key=lambda m: m.n)
        world.expect(marker.seq == progress.seq, "MARKER", f"{self.name} resumed {progress.seq}, its marker says {marker.seq}")
        if step is None:
            world.expect(marker.newest >= newest_before, "READ", f"{marker.newest} was taken for the newest, not {newest_before}")
            newest = world.legit[marker.newest]
            world.expect(attempt in (*world.trail[newest], newest), "READ", f"{progress.seq} is no ancestor of {marker.newest}")
            world.expect(progress.seq == marker.newest or bool(world.damaged), "READ", "passed over a whole checkpoint")
        self.steps = progress.step
        self.trail, self.own = (*world.trail[attempt], attempt), []
        world.count["resumes"] += 1
        world.count["fallbacks"] += step is None and progress.seq != marker.newest
        return True

    def train(self) -> None:
        world = self.world
        self.model.train(self.rng, next(world.ticks), world.pause)
        self.steps += 1

    def turn(self) -> None:
        world, rng = self.world, self.rng
        for _ in range(rng.choice((1, 1, 2))):
            self.train()
            world.pause()
        busy = self.handle is not None and not self.handle.done()
        if busy and rng.random() < 0.9:
            return
        try:
            if rng.random() < world.mix.resume_again and world.legit:
                if not self.resume(world.wanted()):
                    raise NotFoundError("given up")
                return
            if self.handle is not None and rng.random() < 0.2 and not any(self.handle._error is t for t in self.told):
                self.handle.wait()
            self.save(rng.choice(world.mix.kinds))
        except SaveError as error:
            self.told.append(error)

    def save(self, kind: str) -> None:
        world = self.world
        faults_before = self.faults
        try:
            self.handle = self.checkpointer.save_checkpoint(self.steps, kind=kind)  # type: ignore[arg-type]
        except SaveError as error:
            if not any(error is f for f in self.failures):
                world.expect(self.faults > faults_before or bool(world.damaged), "TOLD", f"no cause for {error!r}")
            raise
        self.faults_before = self.faults
        self.attempt = world.ids[-1]
        world.oracle[self.attempt] = {**self.model.snapshot(), "step": self.steps}
        world.trail[self.attempt] = (*self.trail, *self.own)
        world.job_of[self.attempt] = self.name
        self.own.append(self.attempt)

    def carried_out(self) -> None:
        """The background thread is done with the attempt."""
        world, handle = self.world, self.handle
        assert handle is not None
        world.turns.alive()
        world.expect(handle.done(), "LIVE", "an attempt ended and its handle is not done")
        if (error := handle._error) is None:
            world.acknowledge(handle.seq, self.attempt, self.name)
            return
        self.failures.append(error)
        there = world.legit.get(handle.seq)
        excused = self.faults > self.faults_before or there is not None or bool(world.damaged)
        world.expect(excused, "TOLD", f"{self.name}: a save failed without a cause: {error!r}")

    def finish(self) -> None:
        for _ in range(3):
            try:
                self.train()
                self.save(self.rng.choice(self.world.mix.kinds))
                assert self.handle is not None
                self.handle.wait()
            except SaveError as error:
                self.told.append(error)
            else:
                return
        self.world.expect(bool(self.world.damaged), "LIVE", f"{self.name} cannot save any more: {self.told[-1]!r}")

    def told_of_conflict(self) -> None:
        world = self.world
        own = max((s for s, a in world.legit.items() if world.job_of[a] == self.name), default=0)
        lost = any(s > own and world.job_of[a] != self.name for s, a in world.legit.items())
        world.expect(lost, "CONFLICT", f"{self.name} is told that it lost, and nobody else committed")
        world.count["conflicts"] += 1

    def close(self) -> None:
        try:
            self.checkpointer.close()
        except ConflictError:
            self.told_of_conflict()
        except SaveError as error:
            self.told.append(error)
        for error in self.failures:
            if isinstance(error, SaveError):
                times = sum(t is error for t in self.told)
                self.world.expect(times == 1, "TOLD", f"{self.name}: {error!r} was raised {times} times")


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
        found = {f"{t}.{f.name}": repository.read_table(t, seq, field=f.name).ravel().tolist() for t, _, _ in TABLES for f in FIELDS}
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
        self.late: list[tuple[Op, Perform, Job | None]] = []
        self.log: list[str] = []
        self.ids: list[str] = []
        self.ticks = iter(range(1, 1 << 60))
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
        self.ids.append(f"{len(self.ids) + 1:016x}")
        return self.ids[-1]

    def pause(self) -> None:
        self.turns.pause()

    def through(self, op: Op, perform: Perform, job: Job | None) -> Any:
        """A store operation of an actor: it happens when the scheduler lets it, or not, or late."""
        self.pause()
        if self.turns.current is None:
            return perform(op)
        if job is not None and job.resuming and self.turns.current.name == job.name and op.kind == "get" and op.key.startswith(layout.DATA):
            self.expect(bool(self.markers(job.id)), "MARKER", f"{job.name} reads {op.key} before it has marked its resume")
        if op.kind not in WRITES:
            if job is not None and self.faults and self.rng.random() < self.mix.failed_reads:
                job.faults += 1
                raise StorageError(f"injected: no answer to {op}", retryable=True)
            return perform(op)
        self.writes += 1
        op = replace(op, parts=[bytes(part) for part in op.parts])
        if self.writes == self.die_at and job is not None:
            if self.landed:
                self.apply(op, perform)
            self.crash(job)
            raise Crash(op.key)
        lost = self.mix.lost_answers * (3 if op.key.startswith(layout.MANIFESTS) else 1)
        if job is not None and self.faults and self.rng.random() < lost:
            fate = self.rng.choice(self.mix.fates)
            self.log.append(f"no answer ({fate}) to {job.name}: {op.key}")
            job.faults += 1
            if fate == "now":
                self.apply(op, perform)
            elif fate == "late":
                self.late.append((op, perform, job))
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
            found = restore.find(repository, repository.links(seq))
            state = restore.load_state(repository, found, 0)
            model = Model()
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
        wrong = {name: (value, expected[name]) for name, value in found.items() if value != expected[name]}
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

    def crash(self, job: Job) -> None:
        self.log.append(f"crash of {job.name}")
        self.count["crashes"] += 1
        for actor in self.turns.actors:
            if actor.group is job:
                actor.kill()
        if job in self.jobs:
            self.jobs.remove(job)

    def start(self) -> None:
        job = Job(self, f"job {self.count['jobs']}", self.wanted())
        self.count["jobs"] += 1
        self.log.append(f"{job.name} starts, wants {job.wanted_step or 'the newest'}")
        self.jobs.append(job)
        self.turns.spawn(job.name, job.main, job, self.rng.choice((3, 9, 20)))

    def damage(self) -> None:
        bases = [m.seq for m in self.manifests.values() if m.kind == "base"]
        keys = [layout.attempt_prefix(seq, self.legit[seq]) for seq in {*sorted(self.legit)[-2:], bases[-1]}]
        objects = self.memory._objects.by_key
        found = sorted(k for k in objects if any(k.startswith(p) for p in keys))
        if self.mix.damage_manifests:
            found.append(layout.manifest_key(max(self.legit)))
        key = self.rng.choice(found)
        raw = bytearray(objects[key])
        raw[self.rng.randrange(len(raw))] ^= 1 << self.rng.randrange(8)
        objects[key] = bytes(raw)
        self.damaged.add(key)
        self.count["damaged"] += 1
        self.log.append(f"damage to {key}")
        self.mix.older = 0.0
        for job in list(self.jobs) if self.dice(0.5) else ():
            self.crash(job)  # so that somebody reads it

    def land(self, index: int) -> None:
        op, perform, job = self.late.pop(index)
        self.log.append(f"late, of {job.name if job else 'a tool'}:")
        try:
            self.apply(op, perform)
        except ConflictError:
            pass  # the dead do not hear that they were refused

    def dice(self, chance: float) -> bool:
        return self.rng.random() < chance

    def event(self) -> None:
        mix, alive = self.mix, {id(a.group) for a in self.turns.actors}
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
        elif len(self.legit) > 2 and not self.damaged and self.dice(mix.damage):
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
            last = Job(self, "the last", None)
            last.open()
            last.resume(None)
            self.expect(last.checkpointer._last_step == self.oracle[self.legit[max(self.legit)]]["step"], "LIVE", "not the newest")
            report = self.repository().check(deep=True)
            self.expect(report.ok, "READ", f"an undamaged store has problems: {report.problems}")


class _Background:
    """In the place of saving.Background: each job that it is given is an actor."""

    def __init__(self, *, idle: bool) -> None:
        actor = schedule.turns.current
        self._job: Job | None = actor.group if actor is not None else None

    def submit(self, work: Callable[[], None]) -> None:
        job = self._job
        assert job is not None

        def carry_out() -> None:
            work()
            job.carried_out()

        schedule.turns.spawn(f"{job.name}, background", carry_out, job, job.rng.choice((3, 9, 20)))

    def stop(self) -> None:
        pass


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
        patch.setattr(saving, "threading", SimpleNamespace(Event=TurnEvent))
        patch.setattr(stream, "threading", SimpleNamespace(Condition=TurnCondition))
        patch.setattr(saving, "Background", _Background)
        patch.setattr(restore, "ThreadPoolExecutor", Inline)
        patch.setattr(stream.RowStream, "_copy_chunk", copy_chunk_and_pause)
        for module in (saving, checkpointer):
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
