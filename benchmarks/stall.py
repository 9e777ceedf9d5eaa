"""How long a save stops training: a delta against a bare gather, a base against a delta, each by its phases.

It must not know other checkpointers.
"""

from __future__ import annotations

from phases import PHASES, Phases
from plan import Plan
from rows import Row, Target, quartiles, ratio_row
from saving import BASE, DELTA, BareGather, Saved
from timing import rounds_of, seconds_of

from incremental_ckpt.policy import KindPolicy

_ROUNDS = 3  # of the quick measures, for each repeat asked for


def measure_stall(plan: Plan) -> list[Row]:
    """Each arm comes after the same interval of training, so that it meets the same rows in the same caches."""
    training = plan.training
    with plan.saves("stall") as saves:
        first = saves.start()
        gather = BareGather(training, saves.rows_of(first.event.seq))
        phases = Phases()

        def delta() -> Saved:
            training.interval()
            return saves.save(DELTA)

        def bare() -> float:
            training.interval()
            return seconds_of(gather)

        def by_phase() -> dict[str, float]:
            training.interval()
            with phases.watching():
                handle, _ = saves.begin(DELTA)
            handle.wait()
            return dict(phases.seconds)

        repeats, budget = _ROUNDS * plan.repeats, plan.budget / 2
        rounds = rounds_of(lambda: (delta(), bare()), repeats, budget)
        parts = rounds_of(lambda: (by_phase(), bare()), repeats, budget)
    sizes = {
        "rows": first.event.rows,
        "share": first.event.share,
        "gathered_bytes": gather.bytes,
        "bare_seconds": quartiles([b for _, b in rounds])[1],
    }
    target = Target("at most", 2.0)
    rows = [
        ratio_row(
            "stall",
            "save_checkpoint of a delta / bare index_select of its rows",
            [(saved.wall_seconds, bare) for saved, bare in rounds],
            target,
            stall_seconds=quartiles([s.wall_seconds for s, _ in rounds])[1],
            persist_seconds=quartiles([s.event.persist_seconds for s, _ in rounds])[1],
            **sizes,
        ),
        ratio_row(
            "stall",
            "SaveEvent.stall_seconds of a delta / the same",
            [(saved.event.stall_seconds, bare) for saved, bare in rounds],
            target,
            stall_seconds=quartiles([s.event.stall_seconds for s, _ in rounds])[1],
            **sizes,
        ),
    ]
    for phase in PHASES:
        rows.append(
            ratio_row(
                "stall, by phase (a pass of its own)",
                phase,
                [(part[phase], bare) for part, bare in parts],
                phase_seconds=quartiles([part[phase] for part, _ in parts])[1],
            )
        )
    return rows


def measure_base(plan: Plan) -> list[Row]:
    training = plan.training
    with plan.saves("base") as saves:
        saves.start()

        def save(kind: KindPolicy) -> Saved:
            training.interval()
            return saves.save(kind)

        def base() -> Saved:
            saved = save(BASE)
            saves.drop_objects()
            return saved

        rounds = rounds_of(lambda: (base(), save(DELTA)), plan.repeats, plan.budget)
    bases, deltas = [b for b, _ in rounds], [d for _, d in rounds]
    return [
        ratio_row(
            "base",
            "stall of a streamed base / of a delta",
            [(b.wall_seconds, d.wall_seconds) for b, d in rounds],
            Target("at most", 1.0),
            base_stall_seconds=quartiles([b.wall_seconds for b in bases])[1],
            delta_stall_seconds=quartiles([d.wall_seconds for d in deltas])[1],
            base_persist_seconds=quartiles([b.event.persist_seconds for b in bases])[1],
            base_bytes=bases[0].event.bytes,
            delta_bytes=deltas[0].event.bytes,
            delta_share=deltas[0].event.share,
        )
    ]
