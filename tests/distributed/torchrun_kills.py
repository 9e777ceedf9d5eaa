"""Kills the example under torchrun at random moments, one rank or all of them, for each --sharding; compares digests.

It starts the example as a user does, and knows nothing of the library. Linux only.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARDINGS = ("planner", "table-wise", "row-wise", "column-wise", "table-row-wise", "data-parallel", "mixed")
SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--sharding", nargs="+", choices=SHARDINGS, default=SHARDINGS)
    parser.add_argument("--kills", type=int, default=2, help="of each sharding: one rank, then all, and so on")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="incremental-ckpt-torchrun-"))
    try:
        file = folder / "train.tsv"
        generate = [sys.executable, str(EXAMPLES / "synthetic.py"), str(file), "--rows", "20000"]
        subprocess.run(generate, check=True, stdout=subprocess.DEVNULL)
        differing = [s for s in arguments.sharding if not agrees(arguments, folder, file, s)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"THE DIGESTS DIFFER: {', '.join(differing)}" if differing else "all digests agree")
    return 1 if differing else 0


def agrees(arguments: argparse.Namespace, folder: Path, file: Path, sharding: str) -> bool:
    rng = random.Random(f"{arguments.seed} {sharding}")
    store = folder / f"store-{sharding}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(EXAMPLES / "dlrm_criteo.py")]
    command += ["--data", str(file), "--steps", str(arguments.steps), "--save-every", str(arguments.save_every)]
    command += ["--batch-size", "32", "--embedding-dim", "8", "--max-rows-per-table", "2000", "--sharding", sharding]
    uninterrupted = digest_of(command)
    command += ["--store", str(store)]
    kills = 0
    while kills < arguments.kills:
        victim = rng.randrange(arguments.ranks) if kills % 2 == 0 else None
        objects = objects_in(store) + rng.randint(1, 40)
        if live_and_die(command, store, objects, rng.uniform(0, 0.1), victim, arguments.ranks):
            kills += 1
            who = "all ranks" if victim is None else f"rank {victim}"
            manifests = len(list(store.glob("manifests/*.json")))
            print(f"{sharding}: killed {who} with {manifests} checkpoints", flush=True)
        else:
            if digest_of(command) != uninterrupted:
                break
            shutil.rmtree(store)  # a finished run has nothing left to interrupt
    resumed = digest_of(command)
    same = resumed == uninterrupted
    print(f"{sharding}: {uninterrupted} uninterrupted, {resumed} after {kills} kills", flush=True)
    return same


def digest_of(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise SystemExit(f"the example failed with exit code {done.returncode}:\n{done.stderr}")
    return done.stdout.splitlines()[-1].removeprefix("digest ")


def live_and_die(
    command: Sequence[str], store: Path, objects: int, seconds: float, victim: int | None, ranks: int
) -> bool:
    """Run until the store holds so many objects, then SIGKILL a rank (None: all, torchrun too); False if it finished
    first."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as job:
        try:
            deadline = time.monotonic() + SECONDS
            while job.poll() is None and objects_in(store) < objects and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(seconds)
            workers = workers_of(job.pid)
            if job.poll() is not None or len(workers) < ranks:
                return False
            if victim is None:
                return True
            os.kill(workers[victim], signal.SIGKILL)
            return job.wait(SECONDS) != 0  # torchrun ends the others
        finally:
            for pid in (*workers_of(job.pid), job.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


def workers_of(launcher: int) -> list[int]:
    """In order of ranks, as torchrun starts them."""
    try:
        return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    except FileNotFoundError:
        return []


def objects_in(store: Path) -> int:
    return sum(1 for path in store.rglob("*") if path.is_file()) if store.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
