"""The schedules of protocol_model.py driven through the real code: jobs of one and two ranks, readers, crashes, lost
and late writes, damage, and an oracle.

A run is a function of its seed. Jobs use the real Checkpointer over a store in memory; each store operation of each of
their threads waits until the scheduler lets it happen. What is checked, after every write and at the end of the run:

  I1, I3   every visible checkpoint can be read in full
  I2       no key gets other bytes
  I4       one commit for each number, without gaps, and only by the job that owns the number
  I5 I6 I7 I8  a checkpoint reads as exactly the state of the save call: rows, row states, dense state, reader, step
  ACK      an acknowledged commit is in the store, and stays visible
  CONFLICT is reported only to a job that lost
  PARENT   a delta counts from what the manifest before it names as next parent; a branch starts with a base
  LINEAGE  a job extends the lineage of the newest checkpoint that it saw
  MARKER   a resume says so in the store before it reads any row
  READ     a reader gets a right state that is not outdated, or CorruptionError if something is damaged; a fallback is a
           true ancestor
  TOLD     each failed save is raised exactly once, and none fails without a cause
  LIVE     once faults end, a job saves at its second try or learns that it lost, and a resume gets the newest at once
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import turns
from jobs import TABLES, Job, Model, Rank, SharedStore, State
from mixes import Mix
from tools import TOOLS, Tool, plans_are_judged
from turns import Actor, Inline, TurnCondition, TurnEvent, Violation, begin_run

from incremental_ckpt import checkpointer, flight, opening, planning, restore, resuming, saving, stream
from incremental_ckpt.errors import ConflictError, CorruptionError, NotFoundError, StorageError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Manifest, RankManifest
from incremental_ckpt.repository import Repository
from incremental_ckpt.storage.memory import MemoryStore
from incremental_ckpt.testing import Crash, FaultStore, Op, Perform

WRITES = ("put", "put_if_absent", "delete")


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
        self.mix = mix or Mix.drawn(self.rng, seed % 8)
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
        self.needed: dict[int, set[str]] = {}
        self.judges: dict[SharedStore, Callable[[Any], None]] = {}
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
        if self.writes == self.die_at:
            if self.landed:
                self.apply(op, perform)
            if rank is not None:
                self.crash(rank.job, rank)
            self.turns.current.kill()
            raise Crash(op.key)
        lost = self.mix.lost_commits if op.key.startswith(layout.MANIFESTS) else self.mix.lost_answers
        if self.faults and op.kind != "delete" and self.rng.random() < lost:
            fate = self.rng.choice(self.mix.fates)
            self.log.append(f"no answer ({fate}) to {rank.name if rank else 'a tool'}: {op.key}")
            if rank is not None:
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
        deleted = self.stored(key) is None
        self.log.append(f"deletion of {key}" if deleted else key)
        parsed = layout.parse_key(key)
        self.expect(parsed is not None, "FORMAT", f"{key} is no key of the format")
        assert parsed is not None
        if deleted:
            self.expect(parsed.what not in ("manifest", "gone", "repo"), "I4", f"{key} is deleted")
            for seq in self.repository().listing().seqs:
                if key in self.needed.get(seq, ()):
                    self.check(seq)
        elif parsed.what == "manifest":
            self.committed(Manifest.from_bytes(value, key))
        elif parsed.what == "gone":
            self.expect(parsed.seq < max(self.legit), "KEEP", f"the newest checkpoint, {parsed.seq}, is forgotten")
            self.dropped.add(parsed.seq)
        elif parsed.what == "base":
            for seq in self.repository().listing().seqs:
                if seq >= parsed.seq:
                    self.check(seq)

    def committed(self, manifest: Manifest) -> None:
        seq, attempt = manifest.seq, manifest.attempt
        self.log[-1] += (
            f" {manifest.kind} by {self.job_of[attempt]} of step {manifest.step}"
            f" on {manifest.parent and manifest.parent.seq}"
        )
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
        self.expect(
            unreadable or manifest.lineage[:-1] == before,
            "LINEAGE",
            f"{manifest.lineage} of {manifest.seq} does not extend {before}",
        )
        self.expect(begun.job == manifest.job, "LINEAGE", f"{manifest.seq} is of another job than its lineage says")
        self.expect(
            bool(begun.resumed) or begun.first == 1,
            "LINEAGE",
            f"{manifest.seq} is of a job that found nothing, behind others",
        )
        own = [m for m in self.manifests.values() if begun.first <= m.seq < manifest.seq]
        self.expect(
            all(m.job == manifest.job for m in own), "I4", f"{manifest.seq} is among the numbers of another job"
        )
        if manifest.parent is None:
            return
        if own:
            last = own[-1]
            parent = last.next_parent.seq if last.next_parent else last.seq
        else:
            parent = begun.resumed
            self.expect(
                parent == begun.first - 1, "PARENT", f"the branch from {parent} starts with a delta ({manifest.seq})"
            )
        self.expect(
            manifest.parent.seq == parent,
            "PARENT",
            f"{manifest.seq} counts from {manifest.parent.seq}, not from {parent}",
        )

    def check(self, seq: int) -> None:
        """I1, I3, I6 to I8 of one visible checkpoint, all of it read anew."""
        self.needed[seq] = needed = set()

        def note(op: Op, perform: Perform) -> Any:
            needed.add(op.key)
            return perform(op)

        repository = Repository(FaultStore(self.memory, note))
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
        self.expect(
            self.legit.get(seq) == attempt,
            "ACK",
            f"{who} believes that {attempt} is seq {seq}, which is {self.legit.get(seq)}",
        )
        self.acknowledged.append((seq, attempt))
        self.count["acknowledged"] += 1

    def markers(self, job: str) -> list[Any]:
        return [m for m in self.repository().resume_markers() if m.job == job]

    def judge_corruption(self, error: CorruptionError, step: int | None, job: str) -> None:
        self.expect(bool(self.damaged), "READ", f"an undamaged store is called corrupt: {error!r}")
        self.count["given up"] += 1
        if step is not None or any(key.startswith(layout.MANIFESTS) for key in self.damaged):
            return
        if max(m.newest for m in self.markers(job)) < max(self.legit):
            return  # judged on an older listing
        newest = self.legit[max(self.legit)]
        whole = self.repository().check(deep=True).restorable
        left = [s for s in whole if self.legit[s] in self.trail[newest]]
        self.expect(
            not left, "READ", f"given up although the ancestors {left} of {max(self.legit)} are whole: {error!r}"
        )

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
        elif (
            len(self.legit) > 2
            and not self.damaged
            and self.dice(mix.damage * (10 if self.newest_branches_off() else 1))
        ):
            self.damage()
        elif tool := next((t for t in self.tools if self.dice(t.chance(mix))), None):
            self.run_tool(tool)
        elif awake:
            self.step(awake)

    def run_tool(self, tool: Tool) -> Actor:
        self.log.append(f"{tool.name} starts")
        store = SharedStore(self.memory, lambda op, perform: self.through(op, perform, None))
        return self.turns.spawn(tool.name, lambda: tool.body(self, store), None, self.rng.choice(self.mix.tool_speeds))

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
            self.expect(
                seq in self.dropped or (seq in visible and self.legit[seq] == attempt), "ACK", f"seq {seq} is lost"
            )
        for seq in visible if self.dropped else visible[-1:]:
            self.check(seq)
        if self.legit and not self.damaged:
            last = Job(self, "the last", None, 1).ranks[0]
            last.open()
            last.resume(None)
            self.expect(last.steps == self.oracle[self.legit[max(self.legit)]]["step"], "LIVE", "not the newest")
            report = self.repository().check(deep=True)
            self.expect(report.ok, "READ", f"an undamaged store has problems: {report.problems}")


class _Worker:
    """In the place of background.Worker: each job that it is given is an actor."""

    def __init__(self, *, low_priority: bool) -> None:
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


def _with_turn_events(make: Callable[..., Any], *facts: Any, **more: Any) -> Any:
    return make(*facts, **more, interrupt=TurnEvent(), written=TurnEvent())


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

    with plans_are_judged(_worlds), pytest.MonkeyPatch.context() as patch:
        patch.setattr(flight, "threading", SimpleNamespace(Event=TurnEvent))
        own_events = partial(_with_turn_events, flight.Flight)
        patch.setattr(saving, "Flight", own_events)
        patch.setattr(saving, "Persister", partial(saving.Persister, sleep=lambda seconds: _worlds[-1].sleep(seconds)))
        patch.setattr(stream, "threading", SimpleNamespace(Condition=TurnCondition))
        patch.setattr(saving, "Worker", _Worker)
        patch.setattr(restore.rows, "ThreadPoolExecutor", Inline)
        patch.setattr(stream.RowStream, "_copy_chunk", copy_chunk_and_pause)
        patch.setattr(checkpointer, "coordinator", lambda timeout: current_rank().meeting)
        for module in (planning, opening):
            patch.setattr(module, "new_id", lambda: _worlds[-1].new_id())
        patch.setattr(checkpointer, "adapt", lambda model, optimizer, strict: model)
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
