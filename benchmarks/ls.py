"""How long ``ickpt ls`` of many checkpoints takes, against scripts that parse the same manifests and no more.

It must not know models.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from conditions import conditions  # noqa: E402 - the path comes first
from rows import Row, Target, quartiles, ratio_row  # noqa: E402
from timing import rounds_of, seconds_of  # noqa: E402

from incremental_ckpt.format.layout import new_id, rank_manifest_key  # noqa: E402
from incremental_ckpt.format.manifest import Lineage, Manifest, RankRef, Totals  # noqa: E402
from incremental_ckpt.model import CheckpointRef  # noqa: E402
from incremental_ckpt.repository import Repository  # noqa: E402
from incremental_ckpt.storage import LocalStore  # noqa: E402

_SCRIPT = """
import json, sys
from pathlib import Path
import click
for path in sorted(Path(sys.argv[1], "manifests").iterdir()):
    found = json.loads(path.read_bytes())
    print(f"{found['seq']} {found['step']} {found['kind']}")
"""
# As click's documentation begins: one command, its argument and an option.
_COMMAND = """
import json
from pathlib import Path
import click
@click.command()
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(url, as_json):
    for path in sorted(Path(url, "manifests").iterdir()):
        found = json.loads(path.read_bytes())
        click.echo(f"{found['seq']} {found['step']} {found['kind']}")
if __name__ == "__main__":
    ls()
"""
_ENVIRONMENT = {"python": "3.11.7", "numpy": "2.4.6", "torch": "2.13.0", "cuda": None, "threads": 2, "world_size": 1}


def measure_ls(folder: Path, checkpoints: int, repeats: int, budget: float) -> list[Row]:
    """Each in a process of its own, warm."""
    store = folder / "many"
    make_manifests(store, checkpoints)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}

    def run(*command: str) -> float:
        def once() -> None:
            done = subprocess.run(
                [sys.executable, *command], env=environment, capture_output=True, text=True, check=True
            )
            assert len(done.stdout.splitlines()) >= checkpoints, done.stdout

        return seconds_of(once)

    def all_three() -> tuple[float, float, float]:
        ls = run("-m", "incremental_ckpt", "ls", str(store))
        return ls, run("-c", _SCRIPT, str(store)), run("-c", _COMMAND, str(store))

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
            (1, "a script that imports click and parses the same manifests"),
            (2, "a command of click that parses the same manifests"),
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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=1000, help="that are listed")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of A B A B, at most")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds, then no more rounds begin")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ls.json")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=arguments.store, prefix="ls-benchmark-") as folder:
        facts = conditions(Path(folder)) | {"page_cache": "warm", "repeats": arguments.repeats}
        rows = measure_ls(Path(folder), arguments.checkpoints, arguments.repeats, arguments.budget)
    for row in rows:
        print(f"  {row.ratio:8.3f}  {row.what}", flush=True)
    facts["load_average_at_the_end"] = os.getloadavg()[0]
    facts["versions"]["click"] = version("click")
    created = datetime.now(UTC).isoformat(timespec="seconds")
    result = {"created": created, "conditions": facts, "rows": [row.as_json() for row in rows]}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
