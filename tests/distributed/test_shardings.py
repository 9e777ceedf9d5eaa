"""A run killed on some or all of its ranks and resumed is the run that never stopped, whatever the sharding."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from rank_plans import ADAGRAD, MIXED, ROWWISE, Plan, spread
from rank_processes import Group, Raised, Ranks

STEPS = 10

ONE, ALL = "one", "all"


def await_objects(group: Group, store: Path, manifests: int, objects: int) -> bool:
    """Until the store holds so many; False where the ranks have finished before."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not group.finished():
        there = sum(1 for path in store.rglob("*") if path.is_file())
        if there >= objects and len(list(store.glob("manifests/*.json"))) >= manifests:
            return True
        time.sleep(0.001)
    return False


@pytest.mark.parametrize(
    ("world_size", "plan", "fused", "killed"),
    [
        (2, MIXED, ROWWISE, ONE),
        (2, spread("tw0"), ROWWISE, ALL),  # rank 1 has no rows at all
        (2, spread("rw"), ADAGRAD, ALL),
        (2, {**spread("cw0011"), "c": "cw10"}, ROWWISE, ALL),  # two column shards of a table on one rank
        (2, spread("twrw"), ROWWISE, ALL),
        (2, {"a": "rw!dense", "b": "cw0011!dense", "c": "tw1!dense", "d": "dp", "e": "tw0"}, ADAGRAD, ALL),
        (3, {"a": "rw", "b": "cw20", "c": "tw2", "d": "dp", "e": "rw"}, ROWWISE, ONE),
        (4, {"a": "twrw", "b": "cw3201", "c": "dp", "d": "rw", "e": "tw3"}, ADAGRAD, ALL),
        (1, {"a": "rw", "b": "cw00", "c": "tw0", "d": "dp", "e": "dp"}, ROWWISE, ALL),
    ],
    ids=[
        "mixed",
        "tables",
        "row-wise",
        "column-wise",
        "table-row-wise",
        "dense kernels",
        "3 ranks",
        "4 ranks",
        "1 rank",
    ],
)
def test_a_run_killed_hard_and_resumed_ends_like_one_that_never_stopped(
    ranks: Ranks, tmp_path: Path, world_size: int, plan: Plan, fused: str, killed: str
) -> None:
    uninterrupted = ranks.run(world_size, "rank_lives.train", str(tmp_path / "whole"), plan, STEPS, 1, fused)
    assert len(set(uninterrupted)) == 1
    rng = random.Random(repr((world_size, plan)))
    store = tmp_path / "store"
    with ranks.started(world_size, "rank_lives.train", str(store), plan, STEPS, 1, fused, 3.0) as group:
        if await_objects(group, store, rng.randint(1, 3), rng.randint(1, 30)):
            time.sleep(rng.uniform(0, 0.05))
            group.kill(*([rng.randrange(world_size)] if killed == ONE else []))
            if killed == ONE:
                survivors = [outcome for outcome in group.outcomes(40) if outcome is not None]
                assert len(survivors) == world_size - 1
                assert all(isinstance(outcome, Raised) for outcome in survivors)
    resumed = ranks.run(world_size, "rank_lives.train", str(store), plan, STEPS, 9, fused)
    assert [digest for digest, _ in resumed] == [digest for digest, _ in uninterrupted]
    assert len({step for _, step in resumed}) == 1
    assert resumed[0][1] >= 2
