"""What marking changed rows adds to a training step.

It must not know saves.
"""

from __future__ import annotations

from plan import Plan
from rows import Row, Target, quartiles, ratio_row
from timing import rounds_of, seconds_of

from incremental_ckpt.adapters import adapt
from incremental_ckpt.tracker import Tracker

_BLOCK = 8


def measure_tracking(plan: Plan) -> list[Row]:
    """Blocks of steps on the same batches, watched and not watched in turn; a pair is two neighbouring medians."""
    training = plan.training
    adapter = adapt(training.model, training.optimizer)
    tracker = Tracker(adapter.tables())
    each_step: dict[str, list[float]] = {"watched": [], "bare": []}

    def block(arm: str) -> float:
        training.rewind()
        seconds = [seconds_of(training.step) for _ in range(_BLOCK)]
        each_step[arm] += seconds
        return quartiles(seconds)[1]

    def watched() -> float:
        adapter.watch(tracker.mark, tracker.mark_all)
        try:
            return block("watched")
        finally:
            adapter.unwatch()

    def bare() -> float:
        return block("bare")

    bare()
    each_step["bare"].clear()
    pairs = rounds_of(lambda: (watched(), bare()), 5 * plan.repeats, plan.budget)
    medians = {arm: quartiles(seconds)[1] for arm, seconds in each_step.items()}
    return [
        ratio_row(
            "tracking",
            "step with the tracker / without, medians of blocks",
            pairs,
            Target("at most", 1.01),
            steps_per_block=_BLOCK,
            watched_seconds=medians["watched"],
            bare_seconds=medians["bare"],
            ratio_of_all_medians=medians["watched"] / medians["bare"],
        )
    ]
