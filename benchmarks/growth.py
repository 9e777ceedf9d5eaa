"""Stall, bytes and time to durable of a raw delta against the size of the model, the same number of rows changing.

It must not know other checkpointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from fitting import available_bytes, sizes_that_fit
from phases import Phases
from plan import Matrix
from rows import Row, Target, quartiles, ratio_row
from saving import DELTA, BareGather, Saved, Saves
from timing import rounds_of, seconds_of
from workload import Training

_SCAN = "scan the marks"


@dataclass(frozen=True)
class _Case:
    training: Training
    saves: Saves
    gather: BareGather


@dataclass(frozen=True)
class _Turn:
    saved: Saved
    bare_seconds: float
    scan_seconds: float


def measure_growth(matrix: Matrix) -> list[Row]:
    """All models are in memory at once, so that in each round every size has its turn."""
    sizes = sizes_that_fit(matrix.growth_rows, matrix.dim, available_bytes())
    with ExitStack() as stack:
        cases = [_prepare(matrix, rows, stack) for rows in sizes]
        rounds = rounds_of(lambda: [_play(case) for case in cases], matrix.repeats, matrix.budget)
    cases[0].training.close()
    by_case = list(zip(*rounds, strict=True))
    named = [f"{case.training.table_rows / 1e6:.3g}M" for case in cases]
    left_out = ", ".join(f"{rows / 1e6:.3g}M" for rows in matrix.growth_rows if rows not in sizes)
    found = []
    for case, turns, name in list(zip(cases, by_case, named, strict=True))[1:]:
        largest = case is cases[-1]
        found += _rows(case, turns, by_case[0], f"{name} rows / {named[0]}", largest, left_out)
    return [_smallest_row(cases[0], by_case[0], named[0]), *found]


def _prepare(matrix: Matrix, rows: int, stack: ExitStack) -> _Case:
    training = matrix.training(rows, matrix.changed / rows)
    saves = stack.enter_context(matrix.saves(training, f"growth-{rows}"))
    saves.start()
    saves.drop_objects()
    training.interval()
    saved = saves.save(DELTA)
    return _Case(training, saves, BareGather(training, saves.rows_of(saved.event.seq)))


def _play(case: _Case) -> _Turn:
    case.training.interval()
    bare = seconds_of(case.gather)
    case.training.interval()
    saved = case.saves.save(DELTA)
    case.training.interval()
    phases = Phases()
    with phases.watching():
        handle, _ = case.saves.begin(DELTA)
    handle.wait()
    return _Turn(saved, bare, phases.seconds[_SCAN])


def _smallest_row(case: _Case, turns: Sequence[_Turn], name: str) -> Row:
    return ratio_row(
        "growth with rows",
        f"{name} rows: save_checkpoint of a delta / bare index_select of its rows",
        [(t.saved.wall_seconds, t.bare_seconds) for t in turns],
        **_details(case, turns),
    )


def _rows(
    case: _Case, turns: Sequence[_Turn], smallest: Sequence[_Turn], sizes: str, largest: bool, left_out: str
) -> list[Row]:
    pairs = list(zip(turns, smallest, strict=True))
    details = _details(case, turns) | ({"did_not_fit": left_out} if left_out else {})
    return [
        ratio_row(
            "growth with rows",
            f"stall of a delta, {sizes}",
            [(t.saved.wall_seconds, s.saved.wall_seconds) for t, s in pairs],
            Target("at most", 1.5) if largest else None,
            **details,
        ),
        ratio_row(
            "growth with rows", f"bare index_select, {sizes}", [(t.bare_seconds, s.bare_seconds) for t, s in pairs]
        ),
        ratio_row(
            "growth with rows",
            f"bytes of a delta, {sizes}",
            [(t.saved.event.bytes, s.saved.event.bytes) for t, s in pairs],
        ),
        ratio_row(
            "growth with rows",
            f"time to durable, {sizes}",
            [(t.saved.durable_seconds, s.saved.durable_seconds) for t, s in pairs],
        ),
    ]


def _details(case: _Case, turns: Sequence[_Turn]) -> dict[str, float]:
    return {
        "table_rows": case.training.table_rows,
        "rows": turns[-1].saved.event.rows,
        "stall_seconds": quartiles([t.saved.wall_seconds for t in turns])[1],
        "bare_seconds": quartiles([t.bare_seconds for t in turns])[1],
        "scan_seconds": quartiles([t.scan_seconds for t in turns])[1],
        "durable_seconds": quartiles([t.saved.durable_seconds for t in turns])[1],
        "delta_bytes": turns[-1].saved.event.bytes,
    }
