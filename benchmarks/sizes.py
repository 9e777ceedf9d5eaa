"""What a raw delta takes on disk against what it must carry.

It must not know how long anything takes.
"""

from __future__ import annotations

from plan import Plan
from rows import Row, Target, ratio_row
from saving import DELTA

from incremental_ckpt.format.rank_manifest import RankManifest


def measure_bytes(plan: Plan) -> list[Row]:
    """Rows x bytes of a row and its optimizer state, the index of the rows, and the tensors of the state."""
    pairs = []
    with plan.saves("bytes") as saves:
        saved = [saves.start()]
        for _ in range(plan.repeats - 1):
            plan.training.interval()
            saved.append(saves.save(DELTA))
        for each in saved:
            parts = [parts_of(vote) for vote in saves.votes(each.event.seq)]
            pairs.append((each.event.bytes, sum(sum(p.values()) for p in parts)))
    split = {name: sum(p[name] for p in parts) for name in parts[0]}
    last = saved[-1].event
    return [
        ratio_row(
            "bytes",
            "a raw delta / rows x row bytes + index + dense state",
            pairs,
            Target("at most", 1.03),
            delta_bytes=last.bytes,
            rows=last.rows,
            share=last.share,
            row_bytes=split["rows_bytes"] / last.rows,
            **split,
        )
    ]


def parts_of(vote: RankManifest) -> dict[str, int]:
    """Bytes of one rank's records, of the index of their rows, and of the tensors of the state."""
    return {
        "rows_bytes": sum(part.row_count(e) * e.record for part in vote.shards for e in part.entries),
        "index_bytes": sum(s.at.end - s.at.begin for part in vote.shards for s in part.rowsets),
        "dense_bytes": sum(t.at.end - t.at.begin for state in vote.state for t in state.tensors),
    }
