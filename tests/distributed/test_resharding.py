"""A resume on other ranks, with another plan or without any: what comes back, by which rule, what is read for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_plans import ADAGRAD, DIM, MIXED, ROWS, ROWWISE, Plan, spread
from rank_processes import Ranks

from incremental_ckpt import Repository, open_store

UNSHARDED: Plan = {}
BY_TABLE = {**spread("tw0"), "b": "tw1", "d": "tw1"}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], but: tuple[str, ...] = ()) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name not in but:
            assert np.array_equal(found[name].reshape(value.shape), value), name


@pytest.mark.parametrize(
    ("fused", "turns"),
    [
        (ADAGRAD, [(2, BY_TABLE), (1, spread("rw")), (4, {**spread("rw"), "e": "tw3"}), (3, spread("cw02")),
                   (2, spread("dp")), (1, UNSHARDED), (2, MIXED)]),
        (ROWWISE, [(2, BY_TABLE), (1, spread("rw")), (4, {**spread("rw"), "e": "tw3"}), (2, spread("dp")),
                   (2, spread("twrw")), (1, UNSHARDED), (2, spread("tw1"))]),
        (ADAGRAD, [(2, {**spread("rw!dense"), "b": "cw10!dense"}), (1, spread("tw0")), (3, spread("cw0012!dense"))]),
    ],
    ids=["adagrad", "row-wise adagrad", "dense kernels"],
)  # fmt: skip
def test_rows_and_their_state_are_bit_exact_on_other_ranks_and_plans(
    ranks: Ranks, tmp_path: Path, fused: str, turns: list[tuple[int, Plan]]
) -> None:
    before: dict[str, np.ndarray] | None = None
    for number, (world_size, plan) in enumerate(turns):
        lives = ranks.run(world_size, "rank_lives.reshard", str(tmp_path), plan, fused, 2)
        if before is not None:
            for life in lives:
                known = before.keys() & life.resumed.keys()  # what a dense kernel's optimizer holds has no whole
                assert {f"{t}.weight" for t in ROWS} | {"over.weight"} <= known
                assert_equal({n: life.resumed[n] for n in known}, {n: before[n] for n in known})
        assert [life.kind for life in lives] == ["base" if number == 0 else "delta"] * world_size
        before = lives[0].saved
    assert Repository(open_store(tmp_path)).check(deep=True).ok


def test_a_delta_after_a_resharded_resume_is_replayed_over_the_old_shards(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, "rank_lives.reshard", str(tmp_path), BY_TABLE, ADAGRAD, 2)
    saved = ranks.run(3, "rank_lives.reshard", str(tmp_path), spread("rw"), ADAGRAD, 1)[0].saved
    repository = Repository(open_store(tmp_path))
    assert [info.kind for info in repository.chain()] == ["base", "delta"]
    for table in ROWS:
        assert np.array_equal(repository.read_table(f"bags.embedding_bags.{table}"), saved[f"{table}.weight"])


def test_a_rank_whose_shard_of_a_table_has_no_rows_resumes_with_the_others(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(2, "rank_lives.reshard", str(tmp_path), spread("rw"), ROWWISE, 2)[0].saved
    lives = ranks.run(5, "rank_lives.reshard", str(tmp_path), spread("rw"), ROWWISE, 0)  # e has 7 rows: 2, 2, 2, 1, 0
    for life in lives:
        assert_equal(life.resumed, saved)
    again = ranks.run(2, "rank_lives.reshard", str(tmp_path), spread("rw"), ROWWISE, 0)
    assert_equal(again[0].resumed, saved)


def test_row_wise_state_of_column_shards_is_put_back_by_a_rule_that_is_recorded(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, "rank_lives.reshard", str(tmp_path), {**spread("tw0"), "a": "cw01"}, ROWWISE, 3)
    repository = Repository(open_store(tmp_path))
    first = repository.manifest(1)
    shards = [s for r in repository.rank_manifests(first) for s in r.shards if s.shard.table.endswith(".a")]
    assert [(s.shard.col_start, s.shard.cols) for s in shards] == [(0, DIM // 2), (DIM // 2, DIM // 2)]

    together = ranks.run(2, "rank_lives.reshard", str(tmp_path), spread("tw1"), ROWWISE, 0)
    mean = repository.read_table("bags.embedding_bags.a", seq=1, field="sum")
    assert np.array_equal(together[0].resumed["a.sum"].reshape(mean.shape), mean)
    assert np.count_nonzero(mean) > 5
    assert together[0].kind == "base"  # of all ranks, though rank 0 holds no row of it
    assert together[0].rules == [
        "table bags.embedding_bags.a: sum is the mean over the column shards that there were, by shared columns"
    ]

    apart = ranks.run(2, "rank_lives.reshard", str(tmp_path), {**spread("tw1"), "a": "cw10"}, ROWWISE, 0)
    assert apart[0].rules == ["table bags.embedding_bags.a: sum is in every column shard that of all columns"]
    entries = [s for r in repository.rank_manifests(repository.manifest(3)) for s in r.shards]
    assert sum(s.shard.table.endswith(".a") for s in entries) == 2
    again = repository.read_table("bags.embedding_bags.a", seq=3, field="sum")
    assert np.array_equal(again, mean)


def test_a_resume_with_the_same_shards_reads_its_own_rows_and_no_others(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, "rank_lives.reshard", str(tmp_path), {**MIXED, "c": "tw2"}, ROWWISE, 3)
    repository = Repository(open_store(tmp_path))
    votes = repository.rank_manifests(repository.manifest(1))
    lives = ranks.run(3, "rank_lives.reshard", str(tmp_path), {**MIXED, "c": "tw2"}, ROWWISE, 1)
    for rank, life in enumerate(lives):
        own, others = votes[rank], [v for v in votes if v.rank != rank]
        expected = _row_bytes(own) + sum(_row_bytes(v, replicated=True) for v in others)
        expected += sum(_state_bytes(state) for state in own.state)
        expected += sum(_state_bytes(state) for v in others for state in v.state if state.name == "shared")
        assert sum(size for key, size in life.read if key.endswith(".safetensors")) == expected


def test_a_resume_on_more_ranks_reads_little_more_than_its_own_rows(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, "rank_lives.reshard", str(tmp_path), spread("rw"), ROWWISE, 2)
    repository = Repository(open_store(tmp_path))
    (vote,) = repository.rank_manifests(repository.manifest(1))
    lives = ranks.run(4, "rank_lives.reshard", str(tmp_path), spread("rw"), ROWWISE, 1)
    state = sum(
        _state_bytes(s) for s in vote.state if s.name in ("shared", "dense", "optimizer", "fused", "rng", "user")
    )
    read = [sum(size for key, size in life.read if key.endswith(".safetensors")) - state for life in lives]
    rows = _row_bytes(vote)
    largest = max(e.at.end - e.at.begin for s in vote.shards for e in s.entries)
    assert all(0 < each <= rows / 4 + 4 * len(ROWS) * largest for each in read)
    assert sum(read) < 2 * rows


def test_state_of_a_rank_comes_from_the_rank_modulo_the_number_of_ranks_then(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks.run(2, "rank_lives.own_state", str(tmp_path), 3)
    same = ranks.run(2, "rank_lives.own_state", str(tmp_path), 0)
    assert [life.found for life in same] == [life.left for life in first]
    more = ranks.run(3, "rank_lives.own_state", str(tmp_path), 0)
    assert [life.found for life in more] == [first[0].left, first[1].left, first[0].left]
    assert all("3 now" in note and "modulo 2" in note for life in more for note in life.notes)


def _row_bytes(vote: Any, *, replicated: bool | None = None) -> int:
    shards = [s for s in vote.shards if replicated is None or s.replicated == replicated]
    return sum(e.at.end - e.at.begin for s in shards for e in s.entries)


def _state_bytes(state: Any) -> int:
    return sum(t.at.end - t.at.begin for t in state.tensors)
