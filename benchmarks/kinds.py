"""Bytes written per interval and stored in all, by kind of checkpoint and codec, against full fp32 checkpoints.

Which rows an interval touches follows the popularity fitted to Criteo. It must not know how long anything takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from plan import Matrix
from popularity import Popularity
from rows import Row, Target, ratio_row
from saving import BASE, DELTA, Saves
from sizes import parts_of
from workload import Training

from incremental_ckpt.policy import KindPolicy

CODECS = ("raw", "int8", "int4", "int2")
AIMED_SHARE = 0.26
_FEWER = {"int8": 13.5, "int4": 24.0, "int2": 38.0}
_AIMED_INTERVALS = 2


@dataclass(frozen=True)
class _Interval:
    """Bytes of one save, the dense state apart; ``stored`` is what a resume from it needs."""

    base: bool
    rows: int
    written: int
    index: int
    dense: int
    stored: int


def measure_fewer_bytes(matrix: Matrix) -> list[Row]:
    """At the full size: consecutive deltas when the aimed share changes, all counting from one raw base; each codec
    goes on where the one before has ended."""
    folder = matrix.folder / "fewer"
    rows = []
    with closing(matrix.training(matrix.rows, AIMED_SHARE)) as training:
        popularity = Popularity(training.sizes)
        samples = popularity.samples_for(AIMED_SHARE)
        with Saves(training, folder, remove=False, low_priority=False) as saves:
            saves.save(BASE)
        for codec in CODECS:
            remove = codec == CODECS[-1]
            with Saves(training, folder, codec, remove=remove, low_priority=False) as saves:
                saves.checkpointer.resume_from_checkpoint()
                drawn = _drawn(popularity, samples, _AIMED_INTERVALS)
                rows.append(_fewer_row(matrix, training, codec, _play(training, saves, DELTA, drawn)))
    return rows


def measure_kinds(matrix: Matrix) -> list[Row]:
    """Every kind and codec meets the same rows in the same intervals."""
    rows = []
    with closing(matrix.training(matrix.kinds_rows, matrix.shares[0])) as training:
        popularity = Popularity(training.sizes)
        for share in sorted(matrix.shares):
            samples = popularity.samples_for(share)
            for kind in get_args(KindPolicy):
                for codec in matrix.codecs:
                    drawn = _drawn(popularity, samples, matrix.intervals)
                    with Saves(training, matrix.folder / "kinds", codec, low_priority=False) as saves:
                        saves.save(BASE)
                        intervals = _play(training, saves, kind, drawn)
                    rows += _kind_rows(matrix, training, share, kind, codec, intervals)
    return rows


def _drawn(popularity: Popularity, samples: float, intervals: int) -> Iterator[Sequence[np.ndarray]]:
    """The rows that each interval touches: the same ones each time that it is asked."""
    for seed in range(intervals):
        yield popularity.interval(samples, np.random.default_rng(seed))


def _play(training: Training, saves: Saves, kind: KindPolicy, drawn: Iterator[Sequence[np.ndarray]]) -> list[_Interval]:
    """A save after each interval."""
    intervals = []
    written: dict[int, int] = {}
    for rows in drawn:
        training.touch(rows)
        training.update_touched()
        event = saves.save(kind).event
        for seq in {event.seq, *saves.chain(event.seq)} - written.keys():
            written[seq] = _split(saves, seq)[0]
        _, index, dense = _split(saves, event.seq)
        stored = sum(written[seq] for seq in saves.chain(event.seq))
        intervals.append(_Interval(event.kind == "base", event.rows, written[event.seq], index, dense, stored))
    return intervals


def _split(saves: Saves, seq: int) -> tuple[int, int, int]:
    """Bytes of tables and index, of the index alone, and of the dense state."""
    parts = [parts_of(vote) for vote in saves.votes(seq)]
    index = sum(p["index_bytes"] for p in parts)
    return sum(p["rows_bytes"] for p in parts) + index, index, sum(p["dense_bytes"] for p in parts)


def _full_bytes(training: Training, matrix: Matrix) -> int:
    """Of a full fp32 checkpoint: all rows and their row-wise optimizer state; dense state apart."""
    return training.table_rows * (matrix.dim + 1) * 4


def _fewer_row(matrix: Matrix, training: Training, codec: str, intervals: Sequence[_Interval]) -> Row:
    full = _full_bytes(training, matrix)
    return ratio_row(
        "fewer bytes",
        f"{codec}, consecutive, {AIMED_SHARE:.0%} changed: full fp32 checkpoint / delta (tables and index)",
        [(full, i.written) for i in intervals],
        Target("at least", _FEWER[codec]) if codec in _FEWER else None,
        **_details(training, full, intervals),
    )


def _kind_rows(
    matrix: Matrix, training: Training, share: float, kind: str, codec: str, intervals: Sequence[_Interval]
) -> list[Row]:
    full = _full_bytes(training, matrix)
    of = f"{kind}, {codec}, {share:.1%} changed"
    details: dict[str, Any] = _details(training, full, intervals) | {
        "kind": kind,
        "codec": codec,
        "wanted_share": share,
        "bases": sum(i.base for i in intervals),
        "written_in_all_bytes": sum(i.written for i in intervals),
        "stored_bytes": max(i.stored for i in intervals),
    }
    written, stored = details["written_in_all_bytes"], details["stored_bytes"]
    pair = full * len(intervals), written
    return [
        ratio_row("bytes by kind", f"{of}: full fp32 checkpoints / written", [pair], **details),
        ratio_row(
            "storage by kind",
            f"{of}: full fp32 checkpoint / most that a resume from the newest needs",
            [(full, stored)],
            **details,
        ),
    ]


def _details(training: Training, full: int, intervals: Sequence[_Interval]) -> dict[str, Any]:
    last = intervals[-1]
    return {
        "intervals": len(intervals),
        "table_rows": training.table_rows,
        "share": last.rows / training.table_rows,
        "rows": last.rows,
        "full_bytes": full,
        "delta_bytes": last.written,
        "index_bytes": last.index,
        "index_bits_per_row": 8 * last.index / last.rows,
        "dense_bytes": last.dense,
    }
