"""Stall and time to durable of a raw delta, by the share of the rows that changed; training is paused meanwhile.

It must not know other checkpointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from disk import bare_write_seconds
from plan import Matrix
from rows import Row, Target, quartiles, ratio_row
from saving import DELTA, BareGather, Saved, Saves
from timing import rounds_of, seconds_of
from workload import Training

AIMED_SHARE = 0.02


@dataclass(frozen=True)
class _Case:
    """One share: the rows that an interval touches, and a bare copy of what its delta carries."""

    share: float
    touched: Sequence[np.ndarray]
    gather: BareGather


@dataclass(frozen=True)
class _Turn:
    saved: Saved
    bare_seconds: float
    write_seconds: float
    o_direct: bool


def measure_shares(matrix: Matrix) -> list[Row]:
    """In each round every share has its turn."""
    training = matrix.training(matrix.rows, matrix.shares[0])
    with matrix.saves(training, "shares") as saves:
        saves.start()
        cases = [_prepare(training, saves, share) for share in sorted(matrix.shares)]
        saves.drop_objects()

        def play() -> list[_Turn]:
            turns = [_play(matrix, training, saves, case) for case in cases]
            saves.drop_objects()
            return turns

        rounds = rounds_of(play, matrix.repeats, matrix.budget)
    training.close()
    by_case = list(zip(*rounds, strict=True))
    rows = [_stall_row(case, turns) for case, turns in zip(cases, by_case, strict=True)]
    rows += [_durable_row(case, turns) for case, turns in zip(cases, by_case, strict=True)]
    return [*rows, *_growth_rows(cases, by_case)]


def _prepare(training: Training, saves: Saves, share: float) -> _Case:
    training.change(share)
    training.interval()
    saved = saves.save(DELTA)
    return _Case(share, training.touched, BareGather(training, saves.rows_of(saved.event.seq)))


def _play(matrix: Matrix, training: Training, saves: Saves, case: _Case) -> _Turn:
    training.touch(case.touched)
    training.interval()
    bare = seconds_of(case.gather)
    training.interval()
    saved = saves.save(DELTA)
    write, o_direct = bare_write_seconds(matrix.folder / "bare-write", saved.event.bytes)
    return _Turn(saved, bare, write, o_direct)


def _stall_row(case: _Case, turns: Sequence[_Turn]) -> Row:
    last = turns[-1].saved.event
    return ratio_row(
        "stall by share",
        f"{case.share:.1%} changed: save_checkpoint of a delta / bare index_select of its rows",
        [(t.saved.wall_seconds, t.bare_seconds) for t in turns],
        Target("at most", 2.0) if case.share == AIMED_SHARE else None,
        share=last.share,
        rows=last.rows,
        stall_seconds=quartiles([t.saved.wall_seconds for t in turns])[1],
        bare_seconds=quartiles([t.bare_seconds for t in turns])[1],
        gathered_bytes=case.gather.bytes,
    )


def _durable_row(case: _Case, turns: Sequence[_Turn]) -> Row:
    last = turns[-1].saved.event
    return ratio_row(
        "time to durable",
        f"{case.share:.1%} changed: from the call until durable / write + fsync of as many bytes",
        [(t.saved.durable_seconds, t.write_seconds) for t in turns],
        Target("at most", 1.5) if case.share == AIMED_SHARE else None,
        share=last.share,
        delta_bytes=last.bytes,
        durable_seconds=quartiles([t.saved.durable_seconds for t in turns])[1],
        stall_seconds=quartiles([t.saved.wall_seconds for t in turns])[1],
        write_seconds=quartiles([t.write_seconds for t in turns])[1],
        o_direct=all(t.o_direct for t in turns),
    )


def _growth_rows(cases: Sequence[_Case], by_case: Sequence[Sequence[_Turn]]) -> list[Row]:
    """Of the largest share against the smallest, per changed row: 1 is growth with their number."""
    few, many = by_case[0], by_case[-1]
    factor = many[-1].saved.event.rows / few[-1].saved.event.rows
    sizes = f"{cases[-1].share:.1%} changed / {cases[0].share:.1%}"

    def row(what: str, pairs: Sequence[tuple[float, float]]) -> Row:
        per_row = [(a / factor, b) for a, b in pairs]
        return ratio_row("growth with changed rows", f"{what} per changed row, {sizes}", per_row, rows_factor=factor)

    pairs = list(zip(many, few, strict=True))
    return [
        row("stall", [(m.saved.wall_seconds, f.saved.wall_seconds) for m, f in pairs]),
        row("bytes", [(m.saved.event.bytes, f.saved.event.bytes) for m, f in pairs]),
        row("time to durable", [(m.saved.durable_seconds, f.saved.durable_seconds) for m, f in pairs]),
    ]
