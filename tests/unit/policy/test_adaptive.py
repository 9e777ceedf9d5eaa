"""Adaptive: the interval that costs ask for, and runs on a simulated clock that stay in their budget."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from simulated_job import Costs as JobCosts
from simulated_job import SimulatedJob
from small_runs import Run

from incremental_ckpt import Checkpointer, IntervalEvent, SaveEvent, Settings
from incremental_ckpt.adaptive import PROFILED_STEPS, WARM_UP_STEPS, CostMeter
from incremental_ckpt.policy import Adaptive, Costs, EverySteps, Moment
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore, Op, Perform

BUDGET = 0.035


def moment(costs: Costs | None, trained: float = 0.0) -> Moment:
    return Moment(10, None, 10.0, 0, None, 0.0, costs, trained)


class TestPace:
    @pytest.mark.parametrize(
        ("costs", "steps", "bound_by"),
        [
            # ceil(0.07 / (0.035 * 0.1)) = 20
            (Costs(step=0.1, stall=0.07, persist=1.0), 20, "budget"),
            # ceil((5 - 0) / 0.1) = 50
            (Costs(step=0.1, stall=0.07, persist=5.0), 50, "durable"),
            # ceil((5 - 0.2) / 0.1) = 48 and ceil((0.07 + 0.2) / 0.0035) = 78
            (Costs(step=0.1, stall=0.07, persist=5.0, slowdown=0.2), 78, "budget"),
            # ceil(0.0701 / 0.0035) = 21
            (Costs(step=0.1, stall=0.0701, persist=0.0), 21, "budget"),
            (Costs(step=0.1), 1, "durable"),
            # 0.015 of the 0.035 goes to tracking: ceil(0.07 / (0.02 * 0.1)) = 35
            (Costs(step=0.1, stall=0.07, persist=1.0, tracking=0.015), 35, "budget"),
            # a quarter of the budget is for saves in any case: ceil(0.07 / (0.00875 * 0.1)) = 80
            (Costs(step=0.1, stall=0.07, persist=1.0, tracking=0.5), 80, "budget"),
        ],
    )
    def test_it_is_what_a_hand_computes(self, costs: Costs, steps: int, bound_by: str) -> None:
        pace = Adaptive(BUDGET).pace(costs)
        assert (pace.steps, pace.bound_by) == (steps, bound_by)

    def test_with_an_mtbf_it_is_young_and_dalys_optimum(self) -> None:
        # sqrt(2 * 0.08 * 7200) = 33.94 s of steps of 0.1 s
        pace = Adaptive(BUDGET, mtbf=7200).pace(Costs(step=0.1, stall=0.07, persist=1.0, per_save=0.08))
        assert (pace.steps, pace.bound_by) == (340, "mtbf")
        assert pace.seconds == pytest.approx(math.sqrt(2 * 0.08 * 7200))

    def test_failures_that_are_frequent_do_not_lift_the_budget(self) -> None:
        pace = Adaptive(BUDGET, mtbf=10).pace(Costs(step=0.1, stall=0.07, persist=1.0, per_save=0.07))
        assert (pace.steps, pace.bound_by) == (20, "budget")

    def test_it_is_due_when_the_last_save_has_paid_for_itself_and_is_durable(self) -> None:
        costs = Costs(step=0.1, stall=0.07, persist=1.0)
        assert not Adaptive(BUDGET).due(moment(costs, 1.99))
        assert Adaptive(BUDGET).due(moment(costs, 2.01))
        assert not Adaptive(BUDGET).due(moment(Costs(step=0.1, stall=0.07, durable=False), 2.01))
        assert not Adaptive(BUDGET).due(moment(None, 1e9))

    @pytest.mark.parametrize("arguments", [(0.0,), (-1.0,), (float("nan"),), (math.inf,), (0.1, 0.0), (0.1, -5.0)])
    def test_what_is_no_budget_and_no_time_is_refused(self, arguments: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match="positive"):
            Adaptive(*arguments)

    @pytest.mark.parametrize("percent", [1.0, 3.5])
    def test_a_percentage_is_no_share(self, percent: float) -> None:
        with pytest.raises(ValueError, match=r"0\.035 for 3\.5 %"):
            Adaptive(percent)


class TestRun:
    def test_the_first_save_comes_after_a_profile(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),))
        job.run(200)
        # The first step's beginning was not seen.
        assert job.saves[0] == 1 + WARM_UP_STEPS + PROFILED_STEPS

    @pytest.mark.parametrize("jitter", [0.0, 0.1, 0.3])
    def test_it_stays_in_the_budget_when_storage_gets_ten_times_slower_and_returns_when_it_recovers(
        self, jitter: float
    ) -> None:
        job = SimulatedJob((Adaptive(BUDGET),), JobCosts(jitter=jitter))
        assert job.run(4000) <= BUDGET
        before = job.spacing()
        job.costs.persist *= 10
        assert job.run(4000) <= BUDGET
        slow = job.spacing()
        job.costs.persist /= 10
        assert job.run(4000) <= BUDGET
        # (0.02 + 0.45 * 0.04 / 1.04) / 0.035 / 0.075 = 14.2 and a part of a step, and with slow storage 67 steps
        tolerance = 1 if jitter == 0 else 6
        assert before == pytest.approx(16, abs=tolerance)
        assert slow > 3 * before
        assert job.spacing() == pytest.approx(16, abs=tolerance)

    @pytest.mark.parametrize("drift_steps", [300, 1500, 6000])
    def test_a_machine_that_gets_faster_and_slower_by_itself_blurs_nothing(self, drift_steps: int) -> None:
        job = SimulatedJob((Adaptive(BUDGET),), JobCosts(jitter=0.05, drift=0.1, drift_steps=drift_steps))
        assert 0.5 * BUDGET < job.run(12000) <= BUDGET

    def test_noise_of_steps_makes_saves_rarer_by_little(self) -> None:
        quiet, noisy = (SimulatedJob((Adaptive(BUDGET),), JobCosts(jitter=jitter)) for jitter in (0.0, 0.1))
        quiet.run(8000)
        noisy.run(8000)
        assert len(quiet.saves) > len(noisy.saves) > 0.75 * len(quiet.saves)

    def test_storage_that_is_slow_but_no_burden_makes_saves_as_rare_as_they_take(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),), JobCosts(slowdown=0.0, persist=30.0))
        assert job.run(4000) <= BUDGET
        assert job.spacing() == pytest.approx(400, abs=2)

    def test_interference_counts_as_overhead(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),), JobCosts(stall=0.0, persist=2.0, slowdown=0.2))
        assert 0.5 * BUDGET < job.run(4000) <= BUDGET

    @pytest.mark.parametrize("tracking", [0.0004, 0.001])
    def test_tracking_counts_as_overhead(self, tracking: float) -> None:
        job = SimulatedJob((Adaptive(BUDGET),), JobCosts(tracking=tracking))
        assert 0.5 * BUDGET < job.run(4000) <= BUDGET
        assert job.intervals[-1].tracking_seconds == pytest.approx(2 * tracking)

    def test_it_stays_in_the_budget_when_interference_grows(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),))
        job.run(2000)
        job.costs.slowdown = 0.5
        assert 0.5 * BUDGET < job.run(4000) <= BUDGET

    def test_a_larger_budget_is_used(self) -> None:
        job = SimulatedJob((Adaptive(0.1),))
        assert 0.06 < job.run(4000) <= 0.1

    def test_a_failed_save_has_to_be_paid_for_as_well(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),), fails=True)
        assert 0.5 * BUDGET < job.run(4000) <= BUDGET

    def test_saves_that_other_policies_ask_for_are_waited_out_too(self) -> None:
        job = SimulatedJob((EverySteps(1000), Adaptive(BUDGET)))
        job.run(4000)
        assert {1000, 2000, 3000, 4000} <= set(job.saves)
        after = job.saves[job.saves.index(2000) + 1]
        assert after - 2000 >= 13

    def test_a_long_pause_between_two_steps_is_no_step(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),))
        job.run(500)
        usual = job.spacing()
        job.now += 600  # an evaluation
        job.run(500)
        assert job.spacing() == pytest.approx(usual, abs=1)

    def test_steps_so_short_that_asking_takes_more_than_the_budget_are_saved_all_the_same(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),), JobCosts(step=0.002, call=0.0002))
        job.run(10_000)
        assert job.saves[0] == 1 + WARM_UP_STEPS + PROFILED_STEPS
        # (0.02 + 0.4 * 0.04 / 1.04) / (0.25 * 0.035 * 0.002)
        assert job.spacing() == pytest.approx(2022, rel=0.1)

    def test_asking_counts_as_overhead(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),), JobCosts(call=0.001))
        assert 0.5 * BUDGET < job.run(4000) <= BUDGET

    def test_steps_that_were_none_at_first_are_forgotten(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),), JobCosts(step=0.0005, slowdown=0.3, persist=1.0))
        job.run(40)
        job.costs.step = 0.1
        assert job.run(4000) <= BUDGET

    def test_every_second_step_skipped_is_no_reason_to_measure_none(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),), JobCosts(step=0.0005, persist=0.0))
        job.run(40)
        for number in range(400):
            job.costs.step = 0.1 if number % 2 else 0.0005
            job.run(1)
        costs = job.schedule.state_dict()
        assert costs["step_seconds"] / costs["steps"] == pytest.approx(0.05, rel=0.1)

    def test_a_machine_suspended_in_a_save_does_not_put_off_the_next_for_a_day(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),))
        job.run(1000)
        usual = job.spacing()
        known, job.costs.stall = len(job.saves), 3600.0
        while len(job.saves) == known:
            job.run(1)
        job.costs.stall = 0.02
        job.run(int(120 * usual))
        assert len(job.saves) > known + 1

    def test_a_clock_that_goes_back_measures_nothing_below_zero(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),))
        job.run(100)
        job.now -= 50
        job.run(2000)
        assert job.intervals[-1].step_seconds > 0
        assert job.run(2000) <= BUDGET

    def test_it_tells_what_it_measured_and_chose_where_that_changes(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),))
        job.run(2000)
        assert 1 <= len(job.intervals) <= 4
        told = job.intervals[-1]
        assert (told.bound_by, told.interval_steps) == ("budget", pytest.approx(16, abs=1))
        assert told.step_seconds == pytest.approx(0.075)
        assert told.stall_seconds == pytest.approx(0.02)
        assert told.persist_seconds == 0.4
        assert told.slowdown_seconds == pytest.approx(0.4 * 0.04 / 1.04, rel=0.3)
        before = len(job.intervals)
        job.costs.persist *= 10
        job.run(500)
        assert len(job.intervals) > before


class TestState:
    def test_a_resumed_run_keeps_the_interval_without_another_profile(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),), JobCosts(tracking=0.0005))
        job.run(2000)
        resumed = SimulatedJob((Adaptive(BUDGET),), JobCosts(tracking=0.0005), step=2000)
        resumed.schedule.begin(2000, None)
        resumed.schedule.load_state_dict(job.schedule.state_dict())
        assert resumed.schedule.state_dict() == job.schedule.state_dict()
        resumed.run(100)
        assert resumed.saves[0] - 2000 == pytest.approx(job.spacing() + 1, abs=1)

    @pytest.mark.parametrize(
        "changed",
        [
            {}, {"steps": "many"}, {"step_seconds": float("nan")}, {"step_seconds": -1.0}, {"saves": None},
            {"saves": [[1.0]]}, {"saves": [[-1.0, 0.1]]}, {"saves": [[1.0, math.inf]]}, {"per_save": "cheap"},
            {"persist": 10**400},
        ],
    )  # fmt: skip
    def test_what_is_no_such_state_begins_with_a_profile(self, changed: dict[str, object]) -> None:
        meter = CostMeter()
        state = self.measured() | changed if changed else {}
        meter.load_state_dict(state)
        assert meter.costs is None

    def test_the_state_is_taken_whole(self) -> None:
        meter = CostMeter()
        meter.load_state_dict(self.measured())
        assert meter.state_dict() == self.measured()

    def measured(self) -> dict[str, Any]:
        job = SimulatedJob((Adaptive(BUDGET),), JobCosts(jitter=0.1))
        job.run(500)
        return job.schedule.state_dict()

    def test_without_adaptive_there_is_none(self) -> None:
        job = SimulatedJob((EverySteps(10),))
        job.run(50)
        assert job.schedule.state_dict() == {}


class TestSeveralRanks:
    def test_meetings_are_rare_and_the_budget_is_used(self) -> None:
        job = SimulatedJob((Adaptive(BUDGET),), JobCosts(stall=0.5, persist=1.0), alone=False)
        assert 0.5 * BUDGET < job.run(4000) <= BUDGET
        assert len(job.meetings) < 4000 * 0.075 / 2  # less than one in two seconds

    def test_a_signal_is_heard_well_within_the_grace_period(self) -> None:
        job = SimulatedJob((EverySteps(100_000),), alone=False, grace=20.0)
        job.run(4000)
        gaps = [b - a for a, b in zip(job.meetings, job.meetings[1:], strict=False)]
        assert max(gaps) * 0.075 <= 20 / 4
        assert min(gaps[2:]) * 0.075 > 0.9

    def test_without_clocks_and_signals_there_are_meetings_at_saves_only(self) -> None:
        job = SimulatedJob((EverySteps(100),), alone=False)
        job.run(500)
        assert job.meetings == job.saves == [100, 200, 300, 400, 500]


class TestCheckpointer:
    """Writes take 0.05 s and steps 0.1 s by the clock of the run; each save is waited for."""

    def train(self, store_name: str, steps: int) -> list[Any]:
        now = 0.0

        def take_time(op: Op, perform: Perform) -> Any:
            nonlocal now
            now += 0.05 if op.kind in ("put", "put_if_absent") else 0.0
            return perform(op)

        run, events = Run(), list[Any]()
        with Checkpointer(
            run.model, FaultStore(MemoryStore(store_name), take_time), **run.arguments, when=Adaptive(0.5),
            on_event=events.append, settings=Settings(low_priority=False), clock=lambda: now,
        ) as checkpointer:  # fmt: skip
            progress = checkpointer.resume_from_checkpoint()
            done = progress.step if progress else 0
            for step in range(done + 1, done + steps + 1):
                run.train()
                now += 0.1
                if (handle := checkpointer.step(step)) is not None:
                    handle.wait()
        return events

    def test_what_was_measured_is_told_and_a_resumed_run_does_not_measure_it_again(
        self, store_name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "incremental_ckpt"):
            events = self.train(store_name, 60)
        steps = [e.step for e in events if isinstance(e, SaveEvent)]
        assert steps[0] == 1 + WARM_UP_STEPS + PROFILED_STEPS
        told = next(e for e in events if isinstance(e, IntervalEvent))
        assert told.step == steps[0]
        assert told.step_seconds == pytest.approx(0.1)
        assert told.persist_seconds >= 0.05
        assert [m for m in caplog.messages if m.startswith("adaptive: steps of 100.0 ms") and "a save every" in m]

        assert len(steps) >= 3  # else the newest checkpoint comes from a time when no cost was known
        resumed = [e.step for e in self.train(store_name, 60) if isinstance(e, SaveEvent)]
        assert resumed[0] - steps[-1] < WARM_UP_STEPS + PROFILED_STEPS
