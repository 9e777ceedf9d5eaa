"""Stall, bytes and time to durable of a raw delta against the number of ranks that share the model, on gloo.

The ranks share the cores of one machine, one thread each. It must not know what a rank does: gloo_rank.py does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plan import Matrix
from rows import Row, quartiles, ratio_row
from shares import AIMED_SHARE
from timing import rounds_of

_RANK = Path(__file__).with_name("gloo_rank.py")
_PARTS = {
    "stall_seconds": "stall of the slowest rank",
    "durable_seconds": "time to durable",
    "bytes": "bytes of a delta",
}
_ROUNDS = 3
Job = Sequence[Mapping[str, float]]


class RankError(Exception):
    """A rank of a job has failed."""


def measure_ranks(matrix: Matrix) -> list[Row]:
    """In each round there is a job of each number of ranks; a job's figure is the median over its saves."""
    folder = matrix.folder / "ranks"
    rounds = rounds_of(
        lambda: [_medians(_job(matrix, folder, ranks)) for ranks in matrix.ranks],
        min(_ROUNDS, matrix.repeats),
        matrix.budget,
    )
    first = matrix.ranks[0]
    rows = []
    for index, ranks in enumerate(matrix.ranks[1:], start=1):
        of_job = [each[index] for each in rounds]
        details = {part: quartiles([j[part] for j in of_job])[1] for part in _PARTS}
        details["rows"] = of_job[-1]["rows"]
        for part, what in _PARTS.items():
            pairs = [(each[index][part], each[0][part]) for each in rounds]
            other = quartiles([p[1] for p in pairs])[1]
            more = details | {"cores": float(os.cpu_count() or 1), f"{part}_of_{first}_rank": other}
            rows.append(ratio_row("ranks on gloo", f"{what}: {ranks} ranks / {first}", pairs, **more))
    return rows


def _medians(job: Job) -> dict[str, float]:
    return {part: quartiles([save[part] for save in job])[1] for part in (*_PARTS, "rows")}


def _job(matrix: Matrix, folder: Path, ranks: int) -> Job:
    """What rank 0 found out about each save."""
    asked = {
        "rows": matrix.ranks_rows, "dim": matrix.dim, "batch": matrix.batch // max(matrix.ranks),
        "share": AIMED_SHARE, "saves": matrix.repeats, "folder": str(folder),
        "low_priority": matrix.low_priority,
    }  # fmt: skip
    common = {
        **os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    children = [
        subprocess.Popen(
            [sys.executable, str(_RANK), json.dumps(asked)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        answers = [child.communicate() for child in children]
    finally:
        for child in children:
            child.kill()
    for rank, (child, (_, said)) in enumerate(zip(children, answers, strict=True)):
        if child.returncode:
            raise RankError(f"rank {rank} of {ranks} ended with {child.returncode}:\n{said}")
    found: list[dict[str, Any]] = json.loads(answers[0][0].splitlines()[-1])
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
