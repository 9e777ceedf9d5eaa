"""How fast training goes while checkpoints are written beside it, and how fast they are written.

It must not know how a save works.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from disk import bare_write_seconds
from plan import Plan
from rows import Row, Target, quartiles, ratio_row
from saving import BASE, DELTA, Saves
from timing import rounds_of

from incremental_ckpt import SaveEvent, SaveHandle

_BARE_WRITES = 3


def measure_speed(plan: Plan) -> list[Row]:
    return [*_with_deltas(plan), *_with_bases(plan)]


def _with_deltas(plan: Plan) -> list[Row]:
    """Each save begins as soon as the one before is durable.

    The rows that an interval touches are marked anew for each one, not updated: so many updates in so few steps would
    be what is measured. Marking them counts as training time.
    """
    with plan.saves("speed-deltas") as saves:
        saves.start()
        events: list[SaveEvent] = []

        def saving() -> float:
            speed, written = _steps_beside_deltas(plan, saves)
            events.extend(written)
            saves.drop_objects()
            return speed

        rounds = rounds_of(lambda: (saving(), plan.training.steps_per_second(plan.seconds)), plan.repeats, plan.budget)
    return [
        _speed_row("back-to-back deltas", rounds, Target("at least", 0.9), events),
        _write_speed_row(plan, events),
    ]


def _steps_beside_deltas(plan: Plan, saves: Saves) -> tuple[float, list[SaveEvent]]:
    training = plan.training
    handles: list[SaveHandle] = []
    begun, before = time.perf_counter(), training.steps
    while time.perf_counter() - begun < plan.seconds:
        if not handles or handles[-1].done():
            saves.mark_touched()
            handles.append(saves.begin(DELTA)[0])
        training.step()
    speed = (training.steps - before) / (time.perf_counter() - begun)
    handles[-1].wait()
    return speed, [saves.event(handle) for handle in handles]


def _with_bases(plan: Plan) -> list[Row]:
    """A window begins with a base's call and ends when it is durable, or after the wanted seconds; then no step is
    made until it is. Where a base is done early, more follow until the window is long enough."""
    with plan.saves("speed-bases") as saves:
        saves.start()
        events: list[SaveEvent] = []

        def saving() -> float:
            steps, seconds = 0, 0.0
            while seconds < plan.seconds:
                made, took, event = _steps_beside_base(plan, saves, plan.seconds - seconds)
                steps, seconds = steps + made, seconds + took
                events.append(event)
            return steps / seconds

        rounds = rounds_of(lambda: (saving(), plan.training.steps_per_second(plan.seconds)), plan.repeats, plan.budget)
    return [_speed_row("a base that streams", rounds, Target("at least", 0.85), events)]


def _steps_beside_base(plan: Plan, saves: Saves, at_most: float) -> tuple[int, float, SaveEvent]:
    training = plan.training
    begun, before = time.perf_counter(), training.steps
    handle, _ = saves.begin(BASE)
    while not handle.done() and time.perf_counter() - begun < at_most:
        training.step()
    made, seconds = training.steps - before, time.perf_counter() - begun
    handle.wait()
    event = saves.event(handle)
    saves.drop_objects()
    return made, seconds, event


def _speed_row(beside: str, rounds: Sequence[tuple[float, float]], target: Target, events: Sequence[SaveEvent]) -> Row:
    return ratio_row(
        "speed",
        f"steps per second beside {beside} / without",
        rounds,
        target,
        steps_per_second=quartiles([r[0] for r in rounds])[1],
        bare_steps_per_second=quartiles([r[1] for r in rounds])[1],
        saves=len(events),
        bytes_per_save=quartiles([e.bytes for e in events])[1],
        share=quartiles([e.share for e in events])[1],
        stall_seconds=quartiles([e.stall_seconds for e in events])[1],
        persist_seconds=quartiles([e.persist_seconds for e in events])[1],
    )


def _write_speed_row(plan: Plan, events: Sequence[SaveEvent]) -> Row:
    """Bare writes of as many bytes with nothing beside them, at once after the windows."""
    sample = events[-min(_BARE_WRITES, plan.repeats) :]
    bare = [bare_write_seconds(plan.folder / "bare-write", e.bytes) for e in sample]
    return ratio_row(
        "speed",
        "write speed of deltas beside training / of a bare write and fsync",
        [(e.bytes / e.persist_seconds, e.bytes / seconds) for e, (seconds, _) in zip(sample, bare, strict=True)],
        bytes_per_second=quartiles([e.bytes / e.persist_seconds for e in sample])[1],
        bare_bytes_per_second=quartiles([e.bytes / s for e, (s, _) in zip(sample, bare, strict=True)])[1],
        o_direct=all(direct for _, direct in bare),
    )
