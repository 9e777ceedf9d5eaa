"""What saves cost is rank 0's to measure, and old checkpoints are rank 0's to prune: the other ranks do as it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rank_processes import Ranks

from incremental_ckpt import Repository, open_store
from incremental_ckpt.adaptive import PROFILED_STEPS, WARM_UP_STEPS

BUDGET = 0.1


def test_all_ranks_save_when_rank_0_finds_that_the_last_save_has_paid_for_itself_and_what_none_keeps_goes(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, *others = ranks.run(3, "rank_policies.by_the_costs", str(tmp_path), BUDGET, [0.1, 0.8, 0.1], 100)
    assert first.saves[0] > WARM_UP_STEPS + PROFILED_STEPS
    assert first.intervals == [10, 80, 10]
    assert first.stalled / first.seconds <= BUDGET
    assert len(first.saves) >= 7
    assert first.lines == len(first.saves)
    assert len(first.forgotten) >= 3
    for other in others:
        assert other.saves == first.saves
        assert (other.intervals, other.forgotten, other.lines) == ([], [], 0)
    assert_kept(tmp_path, first.saves, first.tables)

    again, *others = ranks.run(3, "rank_policies.by_the_costs", str(tmp_path), BUDGET, [0.1], 40)
    assert again.resumed == first.saves[-1]
    assert np.array_equal(again.tables[again.resumed], first.tables[again.resumed])
    assert again.saves[0] - again.resumed > first.saves[0]  # it knows what a save costs, and lets it be paid for first
    assert [other.saves for other in others] == [again.saves] * 2
    assert_kept(tmp_path, [*first.saves, *again.saves], first.tables | again.tables)


def assert_kept(folder: Path, saves: list[int], tables: dict[int, np.ndarray]) -> None:
    """The two newest, the best, and the base that one-shot deltas count from."""
    repository = Repository(open_store(folder))
    infos = repository.checkpoints()
    best = min(saves, key=lambda step: abs(60 - step))
    assert {info.step for info in infos} == {saves[0], best, *saves[-2:]}
    for info in infos:
        assert np.array_equal(repository.read_table("table", info.seq), tables[info.step])
    assert repository.check(deep=True).ok
