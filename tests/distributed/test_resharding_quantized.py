"""Chains of several codecs on other ranks and plans: each row comes back as the very values that its record stands
for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rank_plans import ADAGRAD, ROWS, Plan, spread
from rank_processes import Ranks

from incremental_ckpt import Repository, compact, open_store

UNSHARDED: Plan = {}
TURNS: list[tuple[int, Plan, str]] = [
    (2, {**spread("tw0"), "b": "tw1", "d": "tw1"}, "raw"),
    (1, spread("rw"), "int4"),
    (4, {**spread("rw"), "e": "tw3"}, "int8"),
    (2, spread("cw01"), "int2"),
    (1, UNSHARDED, "fp16"),
]


def test_rows_of_a_chain_of_several_codecs_are_the_same_bits_on_any_ranks_and_plan_also_compacted(
    ranks: Ranks, tmp_path: Path
) -> None:
    repository = Repository(open_store(tmp_path))
    weights: dict[str, np.ndarray] = {}
    sums: dict[str, np.ndarray] = {}
    for number, (world_size, plan, codec) in enumerate(TURNS):
        lives = ranks.run(world_size, "rank_lives.reshard", str(tmp_path), plan, ADAGRAD, 2, codec)
        for life in lives if number else ():
            assert_same_tables(life.resumed, "weight", weights)
            assert_same_tables(life.resumed, "sum", sums)
        assert {life.kind for life in lives} == {"delta" if number else "base"}
        assert codecs_of(repository, number + 1) == {codec}
        sums = {table: lives[0].saved[f"{table}.sum"] for table in ROWS}
        exact, weights = weights_of(lives[0].saved), read_tables(repository)
        assert (codec == "raw") == all(np.array_equal(exact[table], weights[table]) for table in ROWS)

    assert compact(repository).chain == len(TURNS)
    for table, rows in read_tables(repository).items():
        assert np.array_equal(rows, weights[table])
    for life in ranks.run(3, "rank_lives.reshard", str(tmp_path), spread("rw"), ADAGRAD, 0, "int3"):
        assert_same_tables(life.resumed, "weight", weights)
        assert_same_tables(life.resumed, "sum", sums)
    assert Repository(open_store(tmp_path)).check(deep=True).ok


def assert_same_tables(found: dict[str, np.ndarray] | None, field: str, expected: dict[str, np.ndarray]) -> None:
    assert found is not None
    for table, values in expected.items():
        assert np.array_equal(found[f"{table}.{field}"].reshape(values.shape), values), f"{table}.{field}"


def weights_of(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {table: state[f"{table}.weight"] for table in ROWS}


def read_tables(repository: Repository) -> dict[str, np.ndarray]:
    return {table: repository.read_table(f"bags.embedding_bags.{table}") for table in ROWS}


def codecs_of(repository: Repository, seq: int) -> set[str]:
    """Of the weights that a checkpoint itself carries, but for what no codec holds."""
    votes = repository.rank_manifests(repository.manifest(seq))
    entries = [e for vote in votes for shard in vote.shards for e in shard.entries if e.field == "weight"]
    return {e.codec for e in entries} - ({"raw"} if len({e.codec for e in entries}) > 1 else set())
