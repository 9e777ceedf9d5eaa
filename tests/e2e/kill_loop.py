"""Kills the example again and again at random moments, resumes it each time, and compares with an uninterrupted run.

It starts the example as a user does, and knows nothing of the library.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "dlrm_criteo.py"


@dataclass(frozen=True)
class Moment:
    """When to kill: seconds after the process began, began to train, or wrote its n-th new object to the store."""

    after: str
    seconds: float
    objects: int = 0

    def __str__(self) -> str:
        event = f"object {self.objects}" if self.after == "object" else self.after
        return f"{self.seconds * 1e3:.0f} ms after {event}"


def draw(rng: random.Random, life: float) -> Moment:
    """life: seconds that an uninterrupted run takes."""
    after = rng.choices(("start", "training", "object"), weights=(1, 2, 5))[0]
    longest = {"start": life, "training": life / 2, "object": 0.05}[after]
    return Moment(after, rng.uniform(0, longest), rng.randint(1, 30))


def objects(store: Path) -> int:
    """Everything in the store, unfinished files included."""
    return sum(1 for path in store.rglob("*") if path.is_file()) if store.exists() else 0


def live_and_die(command: Sequence[str], store: Path, moment: Moment, stderr: Path) -> bool:
    """Run until the moment, then SIGKILL; False if the process finished first. Raises if it failed by itself."""
    there = objects(store)
    with stderr.open("w+b") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:

            def reached() -> bool:
                if moment.after == "training":
                    return b" step " in stderr.read_bytes()
                return moment.after == "start" or objects(store) >= there + moment.objects

            while process.poll() is None and not reached():
                time.sleep(0.005)
            time.sleep(moment.seconds)
        finally:
            process.kill()
        code = process.wait()
    if code > 0:
        raise SystemExit(f"the example failed with exit code {code}:\n{stderr.read_text()}")
    return code < 0


def digest_of(command: Sequence[str]) -> str:
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return finished.stdout.splitlines()[-1].removeprefix("digest ")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--kind", default="intermittent")
    arguments = parser.parse_args()

    rng = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="incremental-ckpt-kills-"))
    store = folder / "run"
    command = [sys.executable, str(EXAMPLE), "--data", str(arguments.data), "--steps", str(arguments.steps)]
    command += ["--save-every", str(arguments.save_every), "--batch-size", str(arguments.batch_size)]
    with_store = [*command, "--store", str(store), "--kind", arguments.kind]
    try:
        began = time.monotonic()
        uninterrupted = digest_of(command)
        life = time.monotonic() - began
        print(f"uninterrupted: digest {uninterrupted}", flush=True)
        kills = 0
        while kills < arguments.kills:
            moment = draw(rng, life)
            killed = live_and_die(with_store, store, moment, folder / "stderr")
            kills += killed
            manifests = len(list(store.glob("manifests/*.json")))
            print(f"{'killed' if killed else 'finished before'} {moment}: {manifests} checkpoints", flush=True)
            if not killed and digest_of(with_store) != uninterrupted:
                break
            if not killed:
                # A finished run has nothing left to interrupt.
                shutil.rmtree(store)
        resumed = digest_of(with_store)
        print(f"resumed after {kills} kills: digest {resumed}")
        print("the digests agree" if resumed == uninterrupted else "THE DIGESTS DIFFER")
        return 0 if resumed == uninterrupted else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
