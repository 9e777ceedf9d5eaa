"""A run killed on some or all of its ranks and resumed is the run that never stopped, whatever the sharding."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_kills import Job, dies_and_ends_the_same
from rank_plans import ADAGRAD, MIXED, ROWWISE, Plan, spread
from rank_processes import Ranks

ONE_RANK_HAS_NONE = spread("tw0")
TWO_COLUMN_SHARDS_ON_A_RANK = {**spread("cw0011"), "c": "cw10"}


@pytest.mark.parametrize(
    ("plan", "fused"),
    [
        pytest.param({**spread("tw0"), "b": "tw1", "d": "tw1"}, ADAGRAD, id="table-wise"),
        pytest.param(ONE_RANK_HAS_NONE, ROWWISE, id="table-wise on one rank"),
        pytest.param(spread("rw"), ADAGRAD, id="row-wise"),
        pytest.param(TWO_COLUMN_SHARDS_ON_A_RANK, ROWWISE, id="column-wise"),
        pytest.param(spread("twrw"), ROWWISE, id="table-row-wise"),
        pytest.param(spread("dp"), ROWWISE, id="data-parallel"),
        pytest.param(MIXED, ROWWISE, id="mixed"),
        pytest.param(
            {"a": "rw!dense", "b": "cw0011!dense", "c": "tw1!dense", "d": "dp", "e": "tw0"}, ADAGRAD, id="dense kernels"
        ),
    ],
)
def test_a_run_of_two_ranks_killed_hard_ends_like_one_that_never_stopped(
    ranks: Ranks, tmp_path: Path, plan: Plan, fused: str
) -> None:
    dies_and_ends_the_same(ranks, Job(2, plan, fused, tmp_path / "store"))
