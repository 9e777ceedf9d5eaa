"""When a save is due and which kind it is: pure functions over facts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from incremental_ckpt.policy import (
    Adaptive,
    EveryEpoch,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    Moment,
    NextKind,
    any_due,
    choose_kind,
)

BASE = NextKind(base=True, moves_parent=True)
CONSECUTIVE = NextKind(base=False, moves_parent=True)
ONE_SHOT = NextKind(base=False, moves_parent=False)


def moment(step: int = 1, last_step: int = 0, *, epoch: int | None = None, last_epoch: int | None = None,
           seconds: float = 0.0, last_seconds: float = 0.0) -> Moment:  # fmt: skip
    return Moment(step, epoch, seconds, last_step, last_epoch, last_seconds)


def test_every_k_steps_is_due_at_multiples_of_k() -> None:
    due = [s for s in range(13) if EverySteps(5).due(moment(s, s - 1))]
    assert due == [5, 10]


def test_a_multiple_that_was_passed_by_is_made_up_for_once() -> None:
    assert EverySteps(5).due(moment(11, 9))
    assert not EverySteps(5).due(moment(12, 11))


def test_seconds_count_from_the_last_save() -> None:
    assert EverySeconds(2.5).due(moment(seconds=12.5, last_seconds=10))
    assert not EverySeconds(2.5).due(moment(seconds=12.4, last_seconds=10))


def test_an_epoch_is_due_at_its_first_step_and_never_where_epochs_are_not_told() -> None:
    assert EveryEpoch().due(moment(epoch=2, last_epoch=1))
    assert not EveryEpoch().due(moment(epoch=2, last_epoch=2))
    assert not EveryEpoch().due(moment(epoch=None, last_epoch=1))
    assert not EveryEpoch().due(moment(epoch=1, last_epoch=None))


def test_of_several_policies_one_is_enough() -> None:
    policies = [EverySteps(100), EveryEpoch()]
    assert any_due(policies, moment(7, 6, epoch=2, last_epoch=1))
    assert not any_due(policies, moment(7, 6, epoch=1, last_epoch=1))


@pytest.mark.parametrize("make", [lambda: EverySteps(0), lambda: EverySeconds(0.0), lambda: EverySeconds(float("nan"))])
def test_an_interval_of_nothing_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match="positive"):
        make()  # type: ignore[operator]


def test_each_kind_is_what_its_name_says() -> None:
    assert choose_kind("full", [0.01]) == BASE
    assert choose_kind("one-shot", [0.9, 0.95]) == ONE_SHOT
    assert choose_kind("consecutive", [0.9, 0.9]) == CONSECUTIVE
    with pytest.raises(ValueError, match="sometimes"):
        choose_kind("sometimes", [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shares", "kind"),
    [
        ([], ONE_SHOT),  # nothing to predict from
        ([0.5], ONE_SHOT),  # 1.5 > 2 * 0.5
        ([1.0], BASE),  # 2 <= 2 * 1
        ([0.1, 0.2, 0.3], ONE_SHOT),  # 1.6 > 4 * 0.3
        ([0.25, 0.35, 0.42, 0.48, 0.52], BASE),  # 3.02 <= 6 * 0.52
        ([0.25, 0.35, 0.42, 0.48], ONE_SHOT),  # 2.5 > 5 * 0.48
    ],
)
def test_intermittent_takes_a_base_when_the_predictor_of_check_n_run_says_that_it_pays(
    shares: list[float], kind: NextKind
) -> None:
    assert choose_kind("intermittent", shares) == kind


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: EverySteps("a"), TypeError), (lambda: EverySteps(1.5), TypeError),
        (lambda: EverySteps(True), TypeError),
        (lambda: EverySteps(-1), ValueError), (lambda: EverySeconds("1h"), TypeError),
        (lambda: EverySeconds(float("nan")), ValueError), (lambda: EverySeconds(float("inf")), ValueError),
        (lambda: Adaptive(max_overhead="3%"), TypeError), (lambda: Adaptive(mtbf=0), ValueError),
        (lambda: KeepLast("all"), TypeError), (lambda: KeepBest(0, "auc"), ValueError),
        (lambda: KeepEvery(None), TypeError),
    ],
)  # fmt: skip
def test_what_is_no_number_or_none_that_makes_sense_is_refused_by_the_policys_name(
    make: Callable[[], object], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"takes a"):
        make()


def test_numbers_of_numpy_are_numbers() -> None:
    assert EverySteps(np.int64(5)).due(moment(5, 4))
    assert EverySeconds(np.float32(2.5)).due(moment(seconds=12.5, last_seconds=10))
