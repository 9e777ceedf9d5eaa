"""What runs beside the jobs: readers, compactions and prunes, each a process of its own, several at once.

They must not know the jobs. Another one is a function and a line in TOOLS.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from jobs import FIELDS, TABLES, SharedStore
from mixes import Mix

from incremental_ckpt import pruning
from incremental_ckpt.compaction import compact
from incremental_ckpt.errors import CorruptionError, NotFoundError, StorageError
from incremental_ckpt.policy import KeepLast
from incremental_ckpt.repository import Repository

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver import World

MIB = 1 << 20


@dataclass(frozen=True)
class Tool:
    """Started with some chance at each event: ``body(world, store)``."""

    name: str
    chance: Callable[[Mix], float]
    body: Callable[[World, SharedStore], None]


def read(world: World, store: SharedStore) -> None:
    """Reads the newest checkpoint, or one of a step, and proves what there is."""
    before = max(world.legit, default=0)
    step = world.wanted()
    seq = 0
    try:
        repository = Repository(store)
        seq = repository.resolve(None) if step is None else repository.find(step).seq
        found = {
            f"{t}.{f.name}": dict(enumerate(repository.read_table(t, seq, field=f.name).ravel().tolist()))
            for t, _, _ in TABLES
            for f in FIELDS
        }
    except NotFoundError as error:
        pruned = seq in world.dropped or (step is not None and bool(world.dropped))
        world.expect(not before or pruned, "READ", f"an old store is called empty: {error!r}")
        return
    except CorruptionError as error:
        world.expect(bool(world.damaged), "READ", f"an undamaged store is called corrupt: {error!r}")
        return
    world.expect(step is not None or seq >= before, "READ", f"{seq} was taken for the newest, not {before}")
    world.verify(seq, found)
    if world.rng.random() < 0.3 and not world.mix.prune:
        report = repository.check(deep=True)
        world.expect(report.ok or bool(world.damaged), "READ", f"an undamaged store has problems: {report.problems}")
    world.count["reads"] += 1


def compact_one(world: World, store: SharedStore) -> None:
    if not world.legit:
        return
    seq = world.rng.choice(sorted(world.legit)[-3:])
    parts = world.rng.choice((1, 1, 2))
    try:
        report = compact(Repository(store), seq, memory=64 * MIB, shard=(world.rng.randrange(parts), parts))
    except NotFoundError as error:
        world.expect(seq in world.dropped, "READ", f"{seq} is there, and a compaction does not find it: {error!r}")
    except CorruptionError as error:
        world.expect(bool(world.damaged), "READ", f"an undamaged store is called corrupt: {error!r}")
    except StorageError:
        world.count["compactions given up"] += 1
    else:
        world.count["compactions"] += report.complete and report.rows > 0


def prune_some(world: World, store: SharedStore) -> None:
    keep = world.rng.choice((1, 1, 2, 3))
    marked = {(m.seq, m.newest) for m in world.repository().resume_markers()}

    def judge(plan: pruning.PrunePlan) -> None:
        seqs = sorted({*plan.kept, *plan.forgotten})
        live = {seq for seq, newest in marked if seqs and newest >= seqs[-1]}
        lost = {*seqs[-keep:], *live} & {*plan.forgotten}
        world.expect(not lost or bool(world.damaged), "KEEP", f"keeping {keep}, a prune forgets {lost} of {seqs}")

    world.judges[store] = judge
    try:
        report = pruning.prune(Repository(store), KeepLast(keep), dry_run=False)
    except CorruptionError as error:
        world.expect(bool(world.damaged), "READ", f"an undamaged store is called corrupt: {error!r}")
    except StorageError:
        world.count["prunes given up"] += 1
    else:
        world.count["prunes"] += bool(report.forgotten)


@contextmanager
def plans_are_judged(worlds: list[World]) -> Iterator[None]:
    """Every plan of a prune is shown to the oracle before anything of it is done."""
    make = pruning._plan

    def judged(repository: Any, *arguments: Any) -> pruning.PrunePlan:
        plan = make(repository, *arguments)
        worlds[-1].judges[repository.store](plan)
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruning, "_plan", judged)
        yield


TOOLS = (
    Tool("reader", lambda mix: mix.reader, read),
    Tool("compaction", lambda mix: mix.compact, compact_one),
    Tool("prune", lambda mix: mix.prune, prune_some),
)
