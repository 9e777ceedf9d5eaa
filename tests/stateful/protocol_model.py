"""The protocol of docs/format.md as a program: saves, resumes, compactions, prunes over a store that loses answers.

It shares nothing with the library: it says what the library should do, and shows that the rules hold together. A
change of the protocol is made here first. Every actor (a job's training, the background thread of each of its ranks,
a compaction, a prune, a reader) is a generator that yields one store operation at a time; the scheduler picks who
goes next. Modelled are: several ranks, their votes and the outcome object; one map of marks for each rank; one save
in flight while training goes on; ranks that outlive their job; bases and deltas, one-shot and consecutive, mixed at
will; bases that are streamed in chunks while rows are half changed, made exact by old values; a crash at each write,
landed or not; writes whose answer is lost and which land now, later or never; resumes of the newest, of a number, of
a step, of an ancestor where something is damaged; stalls; deterministic compactions, several at once; prunes, several
at once, as a plan and separate deletes; readers in the midst of all that.

Invariants are checked after every write against an oracle that the protocol cannot see:
  I1, I3   every visible checkpoint can be read in full
  I2       no key gets other bytes
  I4       one commit for each number
  I6, I7   a checkpoint reads as exactly the state of the save call
  ACK      an acknowledged commit stays visible until retention drops it; only a commit is acknowledged, on any rank
  CONFLICT is reported only to a job that lost
  KEEP     a prune keeps the newest k, and what a live job resumed from
  READ     a reader gets a right state, or is told to look again, or corruption where something is damaged; a fallback
           is a true ancestor
  LIVE     once all is quiet the newest checkpoint is read at the first try

``world.rule(name)`` guards what a mutant leaves out; MUTANTS lists them.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

RANKS, ROWS, CHUNK = 2, 4, 1
LOCAL: tuple[Any, ...] = ("local",)
DAMAGED = "damaged"
Op = tuple[Any, ...]
Steps = Generator[Op, Any, Any]


class Timeout(Exception):  # noqa: N818
    """No answer: the write may have landed, may land later, or never."""


class Gone(Exception):  # noqa: N818
    """Something is missing: list again and retry."""


class Corrupt(Exception):  # noqa: N818
    """Something is damaged, or missing for good."""


class NotFound(Exception):  # noqa: N818
    """No such checkpoint."""


class Violation(Exception):  # noqa: N818
    """An invariant does not hold."""


def manifest_key(seq: int, suffix: str = "") -> str:
    return f"manifests/{seq:04d}{suffix}.json"


def seq_of(key: str) -> int:
    return int(key.split("/")[1][:4])


def is_manifest(key: str) -> bool:
    return key.startswith("manifests/") and key.count(".") == 1


def visible(keys: Iterable[str]) -> list[int]:
    there = set(keys)
    return sorted(seq_of(k) for k in there if is_manifest(k) and manifest_key(seq_of(k), ".gone") not in there)


def ancestors(lineage: tuple[tuple[str, int, int], ...], seq: int) -> Iterator[int]:
    """The numbers whose states lie behind the state of ``seq``; a lineage holds (job, first number, resumed from)."""
    while seq:
        _, first, resumed = next(entry for entry in reversed(lineage) if entry[1] <= seq)
        yield from range(seq, first - 1, -1)
        seq = resumed


def ref(manifest: dict[str, Any]) -> tuple[int, str]:
    return manifest["seq"], manifest["attempt"]


# Store operations


def put(key: str, value: Any) -> Steps:
    for _ in range(2):
        try:
            return (yield ("put", key, value))
        except Timeout:
            pass
    raise Timeout


def create(key: str, value: Any) -> Steps:
    """Put if absent, tried twice; returns what is there: ``value`` itself is ours, also where the answer was lost."""
    for _ in range(2):
        try:
            if (yield ("create", key, value)):
                return value
            return (yield ("get", key))
        except Timeout:
            pass
    raise Timeout


def get(key: str) -> Steps:
    value = yield ("get", key)
    if value is None:
        raise Gone(key)
    if value == DAMAGED:
        raise Corrupt(key)
    return value


# Reading


def read_own(manifest: dict[str, Any]) -> Steps:
    rows: dict[int, Any] = {}
    for key in manifest["ranks"]:
        for pack in (yield from get(key))["packs"]:
            rows.update((yield from get(pack)))
    return rows


def read_chain(seq: int, keys: Iterable[str], attempt: str | None = None, inputs: list[Any] | None = None) -> Steps:
    """-> (manifest, rows, number of the chain's base). An equivalent base is taken where it is whole."""
    manifest = yield from get(manifest_key(seq))
    if attempt is not None and manifest["attempt"] != attempt:
        raise Corrupt(("parent digest", seq))
    trouble: Exception | None = None
    if manifest_key(seq, ".base") in keys:
        try:
            equivalent = yield from get(manifest_key(seq, ".base"))
            rows: dict[int, Any] = {}
            for pack in equivalent["packs"]:
                rows.update((yield from get(pack)))
        except (Gone, Corrupt) as error:
            trouble = error
        else:
            if inputs is not None:
                inputs.append(manifest_key(seq, ".base"))
            return manifest, rows, seq
    try:
        rows, base = {}, seq
        if manifest["kind"] != "base":
            _, rows, base = yield from read_chain(*_at(manifest["parent"], keys), inputs=inputs)
        rows.update((yield from read_own(manifest)))
    except (Gone, Corrupt) as error:
        raise (trouble if isinstance(trouble, Gone) else error) from None
    if inputs is not None:
        inputs.append(manifest["attempt"])
    return manifest, rows, base


def _at(parent: tuple[int, str], keys: Iterable[str]) -> tuple[int, Iterable[str], str]:
    return parent[0], keys, parent[1]


def restore(world: World, want: Any, before_reading: Callable[..., Steps] | None = None) -> Steps:
    """-> (manifest, rows, base of the chain, newest manifest), or None for an empty store.

    ``want`` is "newest", ("step", n) or ("seq", n).
    """
    for _ in range(12):
        try:
            keys = yield ("list", "manifests/")
            seqs = visible(keys)
            if not seqs:
                return None
            newest = pick = yield from get(manifest_key(seqs[-1]))
            if want != "newest":
                found = []
                for seq in seqs:
                    manifest = yield from get(manifest_key(seq))
                    if manifest[want[0]] == want[1]:
                        found.append(manifest)
                if not found:
                    raise NotFound
                pick = found[-1]
            while True:
                try:
                    if before_reading is not None:
                        yield from before_reading(pick, newest)
                    manifest, rows, base = yield from read_chain(pick["seq"], keys, pick["attempt"])
                except Corrupt:
                    if want != "newest":
                        raise Corrupt(keys) from None
                    pick = yield from fall_back(world, pick, keys)
                else:
                    return manifest, rows, base, newest
        except Gone:
            world.count["retries"] += 1
    raise Corrupt(None)


def fall_back(world: World, damaged: dict[str, Any], keys: list[str]) -> Steps:
    behind = set(ancestors(damaged["lineage"], damaged["seq"]))
    if not world.rule("fallback_by_ancestors"):
        behind = set(range(damaged["seq"]))
    if not world.rule("history_in_lineage"):
        behind = {damaged["parent"][0]} if damaged["parent"] else set()
    lower = [s for s in visible(keys) if s in behind and s < damaged["seq"]]
    if not lower:
        raise Corrupt(keys)
    return (yield from get(manifest_key(lower[-1])))


# A training job


class Marks:
    """Of one rank: the rows changed since the next parent. Only a commit that moves the parent drops them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.live: set[int] = set()
        self._frozen: set[int] = set()

    def freeze(self) -> set[int]:
        self._frozen, self.live = self.live, set()
        return set(self._frozen)

    def settle(self, committed: bool, attempt: Attempt) -> None:
        drop = committed and attempt.moves_parent
        if not self._world.rule("marks_given_back"):
            drop = drop or not committed
        if not self._world.rule("failed_base_gives_back"):
            drop = drop or attempt.kind == "base"
        if not self._world.rule("one_shot_marks_kept"):
            drop = drop or committed
        if not drop:
            self.live |= self._frozen
        self._frozen = set()


@dataclass
class Attempt:
    seq: int
    name: str
    kind: str
    moves_parent: bool
    parent: tuple[int, str] | None
    next_parent: tuple[int, str] | None
    step: int
    rows: list[set[int]]
    copy: dict[int, Any]
    old_values: dict[int, Any] = field(default_factory=dict)
    copied: set[int] = field(default_factory=set)
    done: bool = False
    result: str = "failed"


class Job:
    def __init__(self, world: World, name: str, want: Any) -> None:
        self.world, self.name, self.want, self.rng = world, name, want, world.rng
        self.rows, self.step = dict.fromkeys(range(ROWS), (0, 0)), 0
        self.newest = 0
        self.parent: tuple[int, str] | None = None
        self.lineage: tuple[tuple[str, int, int], ...] = ((name, 1, 0),)
        self.must_base, self.lost, self.asleep = True, False, False
        self.flight: Attempt | None = None
        self.trail: tuple[str, ...] = ()
        self.own: list[str] = []
        self.marks = [Marks(world) for _ in range(RANKS)]

    def resume(self) -> Steps:
        world = self.world

        def marker(pick: dict[str, Any], newest: dict[str, Any]) -> Steps:
            try:
                yield from put(
                    f"resumes/{self.name}-{next(world.ticks)}", {"seq": pick["seq"], "newest": newest["seq"]}
                )
            except Timeout:
                raise Gone from None

        got = yield from restore(world, self.want, marker)
        if got is None:
            return
        manifest, self.rows, base, newest = got
        world.verify(got, self.want)
        self.step, self.newest, self.parent = manifest["step"], newest["seq"], ref(manifest)
        self.trail = (*world.trail[manifest["attempt"]], manifest["attempt"])
        self.lineage = (*newest["lineage"], (self.name, newest["seq"] + 1, manifest["seq"]))
        self.must_base = world.rule("branch_starts_with_base") and manifest["seq"] != newest["seq"]
        if not world.rule("resumed_is_next_parent"):
            self.parent = ref(world.store.get(manifest_key(base), manifest))

    def train(self) -> Steps:
        for row in self.rng.sample(range(ROWS), 2):
            self.marks[row % RANKS].live.add(row)
            flight = self.flight
            streamed = flight is not None and flight.kind == "base" and row not in flight.old_values
            if streamed and (row in flight.copied) != self.world.rule("old_values_until_copied"):
                flight.old_values[row] = self.rows[row]
            value = next(self.world.ticks)
            self.rows[row] = (value, self.rows[row][1])
            yield LOCAL  # half updated: a chunk that is copied now is torn
            self.rows[row] = (value, value)
        self.step += 1

    def main(self) -> Steps:
        try:
            yield from self.resume()
        except NotFound:
            return
        except Corrupt as error:
            self.world.corrupt(self.want, error)
            return
        while True:
            for _ in range(self.rng.choice((1, 1, 2))):
                yield from self.train()
                yield LOCAL
            flight = self.flight
            if flight is not None:
                if not flight.done:
                    continue
                committed = flight.result == "committed"
                for marks in self.marks:
                    marks.settle(committed, flight)
                if committed and flight.kind == "base":
                    self.must_base = False
            if self.lost:
                return
            self.begin()

    def begin(self) -> None:
        """The meeting and the stall: no store operation is in it."""
        world = self.world
        choice = "base" if self.must_base or self.parent is None else self.rng.choice(world.kinds)
        rows = [marks.freeze() for marks in self.marks]
        if choice == "base":
            rows = [{i for i in range(ROWS) if i % RANKS == rank} for rank in range(RANKS)]
        moves = choice != "one-shot"
        attempt = self.flight = Attempt(
            seq=self.newest + 1,
            name=f"{self.name}{next(world.ticks)}",
            kind="base" if choice == "base" else "delta",
            moves_parent=moves,
            parent=None if choice == "base" else self.parent,
            next_parent=None if moves else self.parent,
            step=self.step,
            rows=rows,
            copy={} if choice == "base" else {i: self.rows[i] for part in rows for i in part},
        )
        world.oracle[attempt.name] = dict(self.rows), self.step
        world.trail[attempt.name] = (*self.trail, *self.own)
        self.own.append(attempt.name)
        for rank in range(RANKS):
            world.spawn(self.background(attempt, rank), self)

    def background(self, attempt: Attempt, rank: int) -> Steps:
        folder = f"data/{attempt.seq:04d}-{attempt.name}"
        packs: list[str] = []
        try:
            yield from self.write(attempt, rank, folder, packs)
            vote = {"ok": True, "packs": packs}
        except Timeout:
            vote = {"ok": False, "packs": []}
        attempt.copied |= attempt.rows[rank]
        try:
            yield from put(f"{folder}/rank-{rank}.json", vote)
        except Timeout:
            pass
        if rank == 0:
            yield from self.commit(attempt, folder)
            return
        for _ in range(10):
            word = yield ("get", f"{folder}/outcome.json")
            if word:
                if word == "committed":
                    self.world.acknowledge(attempt, f"rank {rank}")
                return

    def write(self, attempt: Attempt, rank: int, folder: str, packs: list[str]) -> Steps:
        rows, streamed = sorted(attempt.rows[rank]), attempt.kind == "base"
        chunk = CHUNK if streamed else ROWS
        for begin in range(0, len(rows), chunk):
            ids = rows[begin : begin + chunk]
            if streamed:
                weights = {i: self.rows[i][0] for i in ids}
                yield LOCAL
                copy = {i: (weights[i], self.rows[i][1]) for i in ids}
                copy.update({i: attempt.old_values[i] for i in ids if i in attempt.old_values})
                attempt.copied |= set(ids)
            else:
                copy = {i: attempt.copy[i] for i in ids}
            yield from put(f"{folder}/rank-{rank}-{begin}", copy)
            packs.append(f"{folder}/rank-{rank}-{begin}")
        if self.rng.random() < 0.03:
            raise Timeout  # any other failure of this rank

    def commit(self, attempt: Attempt, folder: str) -> Steps:
        world, result, votes = self.world, "failed", []
        for _ in range(8):
            votes = []
            for rank in range(RANKS):
                votes.append((yield ("get", f"{folder}/rank-{rank}.json")))
            if all(votes):
                break
        manifest = {
            "seq": attempt.seq, "attempt": attempt.name, "job": self.name, "kind": attempt.kind, "step": attempt.step,
            "parent": attempt.parent, "next_parent": attempt.next_parent, "lineage": self.lineage,
            "ranks": [f"{folder}/rank-{rank}.json" for rank in range(RANKS)],
        }  # fmt: skip
        if all(votes) and all(vote["ok"] for vote in votes):
            try:
                found = yield from create(manifest_key(attempt.seq), manifest)
            except Timeout:
                pass  # unknown: the look below may still find it
            else:
                ours = found["job"] == self.name and world.rule("own_late_put_is_ours")
                result = "committed" if found == manifest else "failed" if ours else "conflict"
        result = yield from self.look(attempt, result)
        if result == "conflict":
            self.lost = True
            others = [s for s, name in world.legit.items() if s > self.newest and not name.startswith(self.name)]
            if not others:
                world.fail("CONFLICT", f"{self.name} is told that it lost, and nobody else committed")
        if result == "committed":
            world.acknowledge(attempt, "rank 0")
        try:
            yield from put(f"{folder}/outcome.json", result)
        except Timeout:
            pass
        attempt.result, attempt.done = result, True

    def look(self, attempt: Attempt, result: str) -> Steps:
        """What the store holds now is what the next attempt counts from; memory is not asked."""
        keys = yield ("list", "manifests/")
        seqs = [seq_of(k) for k in keys if is_manifest(k)]
        newest = (yield from get(manifest_key(max(seqs)))) if seqs else None
        if newest is None or newest["seq"] < attempt.seq:
            return result
        if newest["job"] != self.name:
            return result if result == "committed" else "conflict"
        if newest["attempt"] == attempt.name:
            result = "committed"
        self.newest = newest["seq"]
        if self.world.rule("next_parent_from_newest") or result == "committed":
            self.parent = newest["next_parent"] or ref(newest)
        return result


# Compaction, pruning, reading


def compact(world: World) -> Steps:
    try:
        keys = yield ("list", "manifests/")
        seqs = visible(keys)
        if not seqs:
            return
        seq, inputs = world.rng.choice(seqs[-3:]), list[Any]()
        manifest = yield from get(manifest_key(seq))
        if manifest["kind"] == "base":
            return
        _, rows, _ = yield from read_chain(seq, keys, inputs=inputs)
        folder = f"data/{seq:04d}-c{zlib.crc32(repr(inputs).encode()):08x}"
        there = yield ("list", folder + "/")
        packs = []
        for begin in range(0, ROWS, 2):
            packs.append(f"{folder}/{begin}")
            if packs[-1] not in there:
                yield from put(packs[-1], {i: rows[i] for i in range(begin, begin + 2)})
        for pack in packs:
            yield from get(pack)
        yield from create(manifest_key(seq, ".base"), {"of": manifest["attempt"], "packs": packs, "folder": folder})
        world.count["compactions"] += 1
    except (Gone, Corrupt, Timeout):
        world.count["compactions given up"] += 1


def prune(world: World, keep: int) -> Steps:
    keys = yield ("list", "manifests/")
    documents = {}
    for key in keys:
        value = yield ("get", key)
        if value and value != DAMAGED:
            documents[key] = value
    shown = [s for s in visible(keys) if manifest_key(s) in documents]
    if not shown:
        return
    newest = documents[manifest_key(shown[-1])]
    kept = shown[-keep:]
    if world.rule("next_parent_kept"):
        kept.append((newest["next_parent"] or ref(newest))[0])
    markers = []
    for key in (yield ("list", "resumes/")):
        markers.append((yield ("get", key)))
    if world.rule("markers"):
        kept += [m["seq"] for m in markers if newest["seq"] <= m["newest"]]
    need = closed_over_parents(kept, documents)
    drop = [s for s in shown if s not in need]
    world.check_plan(keep, shown, markers, drop)
    data = yield ("list", "data/")
    for seq in reversed(drop):
        world.dropped.add(seq)
        equivalents = [k for k in keys if k == manifest_key(seq, ".base")]
        if world.rule("gone_first"):
            try:
                yield from put(manifest_key(seq, ".gone"), {})
            except Timeout:
                return
        for key in equivalents:
            yield ("delete", key)
        if not world.rule("gone_first"):
            yield from put(manifest_key(seq, ".gone"), {})
        if not world.rule("numbers_kept"):
            yield ("delete", manifest_key(seq))
    for key in data:
        seq, folder = seq_of(key), key.rsplit("/", 1)[0]
        if seq > newest["seq"] or (seq in need and folder in folders(documents, seq)):
            continue
        if seq in need and folder.split("-")[1].startswith("c") and world.rule("live_compaction_kept"):
            equivalent = documents.get(manifest_key(seq, ".base"))
            if equivalent is None or equivalent["folder"] == folder:
                continue
        yield ("delete", key)
    world.count["prunes"] += 1


def closed_over_parents(kept: list[int], documents: dict[str, Any]) -> set[int]:
    need: set[int] = set()
    todo = list(kept)
    while todo:
        seq = todo.pop()
        if seq in need or manifest_key(seq) not in documents:
            continue
        need.add(seq)
        if manifest_key(seq, ".base") not in documents and documents[manifest_key(seq)]["parent"]:
            todo.append(documents[manifest_key(seq)]["parent"][0])
    return need


def folders(documents: dict[str, Any], seq: int) -> set[str]:
    found = {document["ranks"][0].rsplit("/", 1)[0] for k, document in documents.items() if k == manifest_key(seq)}
    return found | {document["folder"] for k, document in documents.items() if k == manifest_key(seq, ".base")}


def reader(world: World, want: Any) -> Steps:
    newest = max(world.legit, default=0)
    try:
        got = yield from restore(world, want)
    except NotFound:
        return
    except Corrupt as error:
        world.corrupt(want, error)
        return
    if got:
        world.verify(got, want)
        world.count["reads"] += 1
        if want == "newest" and got[0]["seq"] < newest and not world.damaged:
            world.fail("READ", "an old checkpoint was taken for the newest")


# The scheduler, the faults, the oracle


@dataclass(eq=False)
class Actor:
    steps: Steps
    job: Job | None
    speed: int
    answer: Any = None
    timed_out: bool = False


class World:
    """One run, a function of its seed.

    Args:
        off: rules that are left out.
        die_at: the actor of the run's ``die_at``-th write dies at it, after it ``landed`` or before.
    """

    def __init__(
        self,
        seed: int,
        off: Iterable[str] = (),
        *,
        die_at: int = 0,
        landed: bool = False,
        count: Counter[str] | None = None,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.off, self.die_at, self.landed, self.writes = frozenset(off), die_at, landed, 0
        self.store: dict[str, Any] = {}
        self.late: list[Op] = []
        self.actors: list[Actor] = []
        self.jobs: list[Job] = []
        self.log: list[str] = []
        self.oracle: dict[str, Any] = {}
        self.trail: dict[str, tuple[str, ...]] = {}
        self.legit: dict[int, str] = {}
        self.acknowledged: list[tuple[int, str]] = []
        self.dropped: set[int] = set()
        self.damaged: set[str] = set()
        self.ticks, self.names = iter(range(1, 1 << 60)), iter(range(50))
        self.count = count if count is not None else Counter()
        self.faults = True
        # Each run has a mixture of its own: what is rare in one is frequent in another.
        self.rate = {
            what: chance * rng.choice((0.3, 1, 1, 4))
            for what, chance in {
                "stall": 0.004, "crash": 0.003, "compact": 0.012, "prune": 0.012, "read": 0.01, "late": 0.015,
                "damage": 0.006,
            }.items()
        }  # fmt: skip
        self.lost_answers = rng.choice((0.01, 0.04, 0.04, 0.2))
        self.fates: tuple[str, ...] = ("now", "late", "late", "never")
        mixed = ("base", "consecutive", "consecutive", "one-shot", "one-shot")
        self.kinds = rng.choice((mixed, ("base", "one-shot"), ("consecutive", "one-shot")))
        focus = seed % 5
        if focus != 0:
            self.rate["damage"] = 0
        if focus == 1:
            self.rate |= {"stall": 0, "compact": 0.048, "prune": 0.048}
        if focus == 2:
            self.rate |= {"stall": 0.016, "prune": 0.048}
            self.lost_answers = 0.2
        if focus == 3:
            self.rate |= {"stall": 0, "crash": 0.001, "prune": 0.048, "late": 0.06}
            self.lost_answers, self.fates = 0.3, ("late",)

    def rule(self, name: str) -> bool:
        return name not in self.off

    def fail(self, name: str, text: str) -> None:
        raise Violation(f"{name}: {text}")

    def spawn(self, steps: Steps, job: Job | None = None) -> Actor:
        actor = Actor(steps, job, self.rng.choice((3, 9, 20) if job else (1, 3, 9)))
        self.actors.append(actor)
        return actor

    def apply(self, op: Op) -> Any:
        kind, key = op[0], op[1]
        if kind == "get":
            return self.store.get(key)
        if kind == "list":
            return sorted(k for k in self.store if k.startswith(key))
        if kind == "delete":
            if self.store.pop(key, None) is not None:
                self.wrote(f"delete {key}")
            return None
        if key in self.store:
            if kind == "put" and self.store[key] not in (op[2], DAMAGED):
                self.fail("I2", f"{key} is overwritten")
            return kind == "put"
        self.store[key] = op[2]
        if is_manifest(key) and op[2]["seq"] > max(self.legit, default=0):
            self.legit[op[2]["seq"]] = op[2]["attempt"]
        detail = f" {op[2]['kind']} {op[2]['attempt']} on {op[2]['parent']}" if is_manifest(key) else ""
        self.wrote(f"{kind} {key}{detail}")
        return True

    def wrote(self, text: str) -> None:
        self.log.append(text)
        if "manifests/" in text or text.startswith("delete"):
            self.check()

    def step(self, actor: Actor) -> None:
        try:
            op = actor.steps.throw(Timeout()) if actor.timed_out else actor.steps.send(actor.answer)
        except (StopIteration, Timeout):
            self.actors.remove(actor)
            return
        actor.answer, actor.timed_out = None, False
        if op is LOCAL:
            return
        if op[0] in ("put", "create", "delete"):
            self.writes += 1
            if self.writes == self.die_at:
                if self.landed:
                    self.apply(op)
                self.crash(actor)
                return
            if self.faults and op[0] != "delete" and self.rng.random() < self.lost_answers:
                fate = self.rng.choice(self.fates)
                actor.timed_out = True
                self.log.append(f"no answer ({fate}) {op[1]}")
                if fate == "now":
                    self.apply(op)
                elif fate == "late":
                    self.late.append(op)
                return
        actor.answer = self.apply(op)

    def crash(self, actor: Actor) -> None:
        job = actor.job
        self.log.append(f"crash of {job.name if job else 'a tool'}")
        if actor in self.actors:
            self.actors.remove(actor)
        if job is None:
            return
        outlives = self.rng.random() < 0.3  # the other ranks may go on for a while
        self.actors = [a for a in self.actors if a.job is not job or (outlives and is_background(a))]
        if job in self.jobs:
            self.jobs.remove(job)

    def wanted(self) -> Any:
        dice = self.rng.random()
        if dice < 0.7 or not self.legit:
            return "newest"
        recent = sorted(self.legit)[-4:]
        if dice < 0.9:
            return "seq", self.rng.choice(recent)
        return "step", self.oracle[self.legit[self.rng.choice(recent)]][1]

    def dice(self, what: str) -> bool:
        return self.rng.random() < self.rate[what]

    def event(self) -> None:
        rng = self.rng
        self.jobs = [j for j in self.jobs if any(a.job is j and not is_background(a) for a in self.actors)]
        awake = [a for a in self.actors if not (a.job and a.job.asleep)]
        if all(j.asleep for j in self.jobs) and len(self.oracle) < 40:
            job = Job(self, chr(65 + next(self.names)), self.wanted())
            self.jobs.append(job)
            self.spawn(job.main(), job)
            self.log.append(f"{job.name} starts, wants {job.want}")
        elif self.jobs and self.dice("stall"):
            job = rng.choice(self.jobs)
            job.asleep = not job.asleep
            self.log.append(f"{job.name} {'stalls' if job.asleep else 'wakes'}")
        elif self.jobs and self.dice("crash"):
            self.crash(rng.choice([a for a in self.actors if a.job]))
        elif self.dice("compact"):
            self.spawn(compact(self))
        elif self.dice("prune"):
            self.spawn(prune(self, rng.choice((1, 1, 2, 3))))
        elif self.dice("read"):
            self.spawn(reader(self, self.wanted()))
        elif self.late and self.dice("late"):
            self.apply(self.late.pop(rng.randrange(len(self.late))))
        elif not self.damaged and len(self.legit) > 1 and self.dice("damage"):
            self.damage()
        elif awake:
            self.step(rng.choices(awake, [a.speed for a in awake])[0])

    def damage(self) -> None:
        prefixes = [f"data/{s:04d}-{self.legit[s]}/rank" for s in sorted(self.legit)[-2:]]
        keys = [k for k in self.store if any(k.startswith(p) for p in prefixes)]
        if keys:
            key = self.rng.choice(keys)
            self.store[key] = DAMAGED
            self.damaged.add(key)
            self.log.append(f"damage to {key}")

    def run(self, events: int = 600) -> World:
        """Raises Violation."""
        for _ in range(events):
            self.event()
        self.faults = False
        for actor in list(self.actors):
            while actor in self.actors and not actor.job:
                self.step(actor)
        self.check()
        if self.legit and not self.damaged:
            before = self.count["retries"]
            got = self.now(restore(self, "newest"))
            if not got or got[0]["seq"] != max(self.legit) or self.count["retries"] != before:
                self.fail("LIVE", "the newest cannot be read at once")
        return self

    def now(self, steps: Steps) -> Any:
        try:
            op = next(steps)
            while True:
                op = steps.send(self.apply(op))
        except StopIteration as end:
            return end.value

    def acknowledge(self, attempt: Attempt, who: str) -> None:
        if self.legit.get(attempt.seq) != attempt.name:
            self.fail(
                "ACK", f"{who} believes that {attempt.name} is {attempt.seq}, which is {self.legit.get(attempt.seq)}"
            )
        self.acknowledged.append((attempt.seq, attempt.name))

    def verify(self, got: Any, want: Any) -> None:
        manifest, rows, _, newest = got
        attempt = manifest["attempt"]
        if self.legit.get(manifest["seq"]) != attempt:
            self.fail("READ", f"{attempt} was read as {manifest['seq']}")
        if (rows, manifest["step"]) != self.oracle[attempt]:
            self.fail("I6", f"a reader got a wrong state for {manifest['seq']}")
        if want == "newest" and attempt not in (*self.trail[newest["attempt"]], newest["attempt"]):
            self.fail("READ", "fallback to a state that is no ancestor")

    def corrupt(self, want: Any, error: Corrupt) -> None:
        if not self.damaged:
            self.fail("READ", "an undamaged store is called corrupt")
        if error.args[0] != self.apply(("list", "manifests/")) or want != "newest":
            return  # judged on an older listing
        shown = visible(self.store)
        behind = self.trail[self.store[manifest_key(shown[-1])]["attempt"]]
        for seq in shown:
            if self.legit[seq] in behind and seq not in self.dropped:
                try:
                    self.now(read_chain(seq, set(self.store)))
                except (Gone, Corrupt):
                    continue
                self.fail("READ", f"given up although the ancestor {seq} of {shown[-1]} is whole")

    def check_plan(self, keep: int, shown: list[int], markers: list[Any], drop: list[int]) -> None:
        resumed = {m["seq"] for m in markers if m["newest"] >= shown[-1]}
        if lost := set(drop) & {*shown[-keep:], *resumed}:
            self.fail("KEEP", f"keeping {keep}, a prune drops {lost}")

    def check(self) -> None:
        keys = set(self.store)
        shown = {s: self.store[manifest_key(s)] for s in visible(keys)}
        for seq, manifest in shown.items():
            if self.legit.get(seq) != manifest["attempt"]:
                self.fail("I4", f"{manifest['attempt']} is visible as {seq}")
            try:
                _, rows, _ = self.now(read_chain(seq, keys))
            except (Gone, Corrupt) as error:
                if not self.damaged:
                    self.fail("I1", f"{seq} is visible and cannot be read: {error}")
                continue
            if (rows, manifest["step"]) != self.oracle[manifest["attempt"]]:
                self.fail("I6", f"{seq} reads as another state")
        for seq, attempt in self.acknowledged:
            if seq not in self.dropped and shown.get(seq, {}).get("attempt") != attempt:
                self.fail("ACK", f"the acknowledged {seq} is lost")


def is_background(actor: Actor) -> bool:
    return actor.steps.__name__ == "background"


MUTANTS = {
    "marks_given_back": "marks are dropped when they are read: a failed save loses rows",
    "failed_base_gives_back": "a failed base drops its marks",
    "one_shot_marks_kept": "a one-shot delta drops its marks although the next delta counts from its parent",
    "resumed_is_next_parent": "after a resume deltas count from the base of the chain, with no marks",
    "branch_starts_with_base": "after a resume from an older number the first save may be a delta",
    "next_parent_from_newest": "the next parent is kept in memory: a put that landed late is overlooked",
    "old_values_until_copied": "old values are kept only for rows of chunks already streamed",
    "own_late_put_is_ours": "a late put of our own is taken for a conflict",
    "fallback_by_ancestors": "the fallback is the next lower number",
    "history_in_lineage": "the parent is the only link to ancestors, and a base has none",
    "markers": "a prune ignores resume markers",
    "next_parent_kept": "a prune drops what the attempt in flight counts from",
    "live_compaction_kept": "a prune takes the packs of a running compaction for orphans",
    "gone_first": "a prune deletes equivalents before it says that the checkpoint is gone",
    "numbers_kept": "a prune deletes the manifests of what it drops, so that numbers are used again",
}
"""What is left out by name, and the mistake that this is."""


def sweep(
    seeds: Iterable[int], off: Iterable[str] = (), *, first_only: bool = False
) -> tuple[Counter[str], list[tuple[int, str, list[str]]]]:
    """-> (counts, violations as (seed, text, log))."""
    count: Counter[str] = Counter()
    violations = []
    for seed in seeds:
        world = World(seed, off, count=count)
        count["runs"] += 1
        try:
            world.run()
        except Violation as violation:
            violations.append((seed, str(violation), world.log))
        count["commits"] += len(world.legit)
        count["writes"] += world.writes
        if violations and first_only:
            break
    return count, violations
