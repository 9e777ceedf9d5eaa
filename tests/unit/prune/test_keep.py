"""What is worth keeping: pure functions over the checkpoints that there are."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from incremental_ckpt.model import CheckpointInfo
from incremental_ckpt.policy import Keep, KeepBest, KeepEvery, KeepLast, kept_by_any


def info(seq: int, step: int, metrics: Mapping[str, float] | None = None, loss: float | None = None) -> CheckpointInfo:
    created = datetime(2026, 1, 1, tzinfo=UTC)
    return CheckpointInfo(seq, step, None, loss, metrics or {}, "base", None, 1, 1, 1, created, "", "", 1)


def test_the_newest_are_kept_by_number() -> None:
    infos = [info(3, 30), info(5, 20), info(6, 25)]
    assert KeepLast(2).kept(infos) == {5, 6}
    assert KeepLast(9).kept(infos) == {3, 5, 6}


def test_the_best_are_kept_and_the_newer_of_equal_ones() -> None:
    infos = [info(1, 1, {"auc": 0.7}), info(2, 2, {"auc": 0.9}), info(3, 3, {"auc": nan}), info(4, 4),
             info(5, 5, {"auc": 0.7}), info(6, 6, {"auc": 0.1})]  # fmt: skip
    assert KeepBest(2, "auc").kept(infos) == {2, 5}
    assert KeepBest(1, "auc", "min").kept(infos) == {6}
    assert KeepBest(9, "auc").kept(infos) == {1, 2, 5, 6}


def test_where_no_checkpoint_has_the_metric_all_are_kept_since_its_name_may_be_misspelt() -> None:
    assert KeepBest(1, "acu").kept([info(1, 1, {"auc": 0.7}), info(2, 2, {"auc": 0.9})]) == {1, 2}
    assert KeepBest(1, "acu").kept([info(1, 1, {"acu": nan}), info(2, 2, {"auc": 0.9})]) == {1, 2}


def test_the_loss_is_a_metric() -> None:
    losses = [info(1, 1, loss=0.5), info(2, 2, loss=0.4), info(3, 3)]
    assert KeepBest(1, "loss", "min").kept(losses) == KeepBest(1, "loss").kept(losses) == {2}
    assert KeepBest(1, "loss", "max").kept(losses) == {1}


def test_the_first_at_or_after_each_multiple_is_kept() -> None:
    infos = [info(seq, step) for seq, step in enumerate([0, 40, 90, 100, 140, 205, 260, 510], 1)]
    assert KeepEvery(100).kept(infos) == {1, 4, 6, 8}


def test_of_equal_steps_the_newest_is_kept() -> None:
    assert KeepEvery(100).kept([info(1, 100), info(2, 200), info(3, 100), info(4, 150)]) == {2, 3}


def test_several_policies_keep_what_one_of_them_keeps() -> None:
    infos = [info(seq, seq * 50) for seq in range(1, 8)]
    assert kept_by_any([KeepLast(1), KeepEvery(100)], infos) == {2, 4, 6, 7}


@pytest.mark.parametrize(
    "make",
    [lambda: KeepLast(0), lambda: KeepBest(0, "a"), lambda: KeepEvery(-1), lambda: KeepBest(1, "a", "up")],  # type: ignore[arg-type]
)
def test_arguments_out_of_range_are_refused(make: type) -> None:
    with pytest.raises(ValueError, match="takes"):
        make()


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0.1, 0.2, nan])), min_size=1, max_size=12),
    st.sampled_from([KeepLast(2), KeepBest(2, "m"), KeepEvery(5), KeepEvery(7)]),
)
def test_forgetting_the_others_changes_nothing(facts: list[tuple[int, float]], policy: Keep) -> None:
    infos = [info(seq, step, {"m": value}) for seq, (step, value) in enumerate(facts, 1)]
    kept = policy.kept(infos)
    assert policy.kept([i for i in infos if i.seq in kept]) == kept
