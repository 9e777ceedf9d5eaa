"""A run killed hard and resumed is the run that never stopped, on one, three and four ranks as on two."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_kills import Job, dies_and_ends_the_same
from rank_plans import ADAGRAD, ROWWISE, Plan
from rank_processes import Ranks


@pytest.mark.parametrize(
    ("world_size", "plan", "fused"),
    [
        pytest.param(1, {"a": "rw", "b": "cw00", "c": "tw0", "d": "dp", "e": "dp"}, ROWWISE, id="1 rank"),
        pytest.param(3, {"a": "rw", "b": "cw20", "c": "tw2", "d": "dp", "e": "rw"}, ROWWISE, id="3 ranks"),
        pytest.param(4, {"a": "twrw", "b": "cw3201", "c": "dp", "d": "rw", "e": "tw3"}, ADAGRAD, id="4 ranks"),
    ],
)
def test_a_run_killed_hard_ends_like_one_that_never_stopped_on_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, world_size: int, plan: Plan, fused: str
) -> None:
    dies_and_ends_the_same(ranks, Job(world_size, plan, fused, tmp_path / "store"))
