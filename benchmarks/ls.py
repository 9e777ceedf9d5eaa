"""How long ``ickpt ls`` of many checkpoints takes, against a script that parses the same manifests and no more.

It must not know models.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rows import Row, Target, quartiles, ratio_row
from timing import rounds_of, seconds_of

from incremental_ckpt.format.layout import new_id, rank_manifest_key
from incremental_ckpt.format.manifest import Lineage, Manifest, RankRef, Totals
from incremental_ckpt.model import CheckpointRef
from incremental_ckpt.repository import Repository
from incremental_ckpt.storage import LocalStore

_IMPORTS = """
import json, sys
from pathlib import Path
import typer
for path in sorted(Path(sys.argv[1], "manifests").iterdir()):
    found = json.loads(path.read_bytes())
    print(f"{found['seq']} {found['step']} {found['kind']}")
"""
# What an import of typer leaves for the first command that is built (0.29 loads pydantic then) belongs to it as well.
_COMMAND = """
import json
from pathlib import Path
import typer
def ls(url: str, as_json: bool = False) -> None:
    for path in sorted(Path(url, "manifests").iterdir()):
        found = json.loads(path.read_bytes())
        print(f"{found['seq']} {found['step']} {found['kind']}")
typer.run(ls)
"""
_ENVIRONMENT = {"python": "3.11.7", "numpy": "2.4.6", "torch": "2.13.0", "cuda": None, "threads": 2, "world_size": 1}


def measure_ls(folder: Path, checkpoints: int, repeats: int, budget: float) -> list[Row]:
    """Each in a process of its own, warm."""
    store = folder / "many"
    make_manifests(store, checkpoints)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}

    def run(*command: str) -> float:
        def once() -> None:
            done = subprocess.run(
                [sys.executable, *command], env=environment, capture_output=True, text=True, check=True
            )
            assert len(done.stdout.splitlines()) >= checkpoints, done.stdout

        return seconds_of(once)

    def all_three() -> tuple[float, float, float]:
        ls = run("-m", "incremental_ckpt", "ls", str(store))
        return ls, run("-c", _IMPORTS, str(store)), run("-c", _COMMAND, str(store))

    all_three()
    rounds = rounds_of(all_three, repeats, budget)
    shutil.rmtree(store)
    return [
        ratio_row(
            "ls",
            f"ickpt ls of {checkpoints:,} checkpoints / {peer}",
            [(each[0], each[index]) for each in rounds],
            Target("at most", 3.0),
            ls_seconds=quartiles([each[0] for each in rounds])[1],
            script_seconds=quartiles([each[index] for each in rounds])[1],
        )
        for index, peer in (
            (1, "a script that imports typer and parses the same manifests"),
            (2, "a command of typer that parses the same manifests"),
        )
    ]


def make_manifests(folder: Path, count: int) -> None:
    """A base and deltas on each other, without data: a listing reads manifests only."""
    repository, job = Repository(LocalStore(folder)), new_id()
    repository.create()
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    parent: CheckpointRef | None = None
    for seq in range(1, count + 1):
        attempt = new_id()
        ref = RankRef(rank_manifest_key(seq, attempt, 0), 20_000, f"{seq:064x}")
        manifest = Manifest(
            seq=seq, step=1000 * seq, epoch=0, loss=0.5, metrics={"auc": 0.7}, kind="delta" if parent else "base",
            parent=parent, next_parent=None, job=job, attempt=attempt, lineage=(Lineage(job, 1, 0),),
            created=begun + timedelta(minutes=seq), world_size=1, ranks=(ref,),
            totals=Totals(211_000, 10_570_000, 56_000_000), environment=_ENVIRONMENT,
        )  # fmt: skip
        parent = repository.commit(manifest).ref
