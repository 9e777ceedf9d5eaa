"""Shows what incremental_ckpt is for: trains, kills the training hard, resumes, and compares the digests.

Every run is its own process of dlrm_criteo.py; this script only starts, kills and compares.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from saves import read_saves, table_of

EXAMPLE = Path(__file__).with_name("dlrm_criteo.py")
STEPS, SAVE_EVERY = 300, 30
KILL_AFTER_CHECKPOINTS = 4
console = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="a Criteo file; default: a synthetic one")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="incremental-ckpt-demo-"))
    try:
        return show(folder, arguments.data)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)  # the example has said why
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def show(folder: Path, data: Path | None) -> int:
    began = time.monotonic()
    training = [sys.executable, str(EXAMPLE), "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
    training += ["--batch-size", "512", "--embedding-dim", "32", "--max-rows-per-table", "500000"]
    training += ["--data", str(data)] if data else ["--cache", str(folder), "--synthetic-rows", "160000"]
    log = folder / "saves.jsonl"
    with_store = [*training, "--store", str(folder / "run"), "--save-log", str(log)]

    console.print(f"\n[bold]1  Train {STEPS} steps without interruption[/bold], saving nothing")
    uninterrupted = digest_of(training)
    console.print(f"   digest {uninterrupted}")

    console.print(f"\n[bold]2  The same training with a checkpoint every {SAVE_EVERY} steps[/bold]")
    if not kill_in_the_middle(with_store, folder / "run"):
        console.print("   the run ended before it could be killed")
        return 1
    before = read_saves(log)
    console.print(f"\n   [bold red]killed[/bold red] (SIGKILL) after the checkpoint at step {before[-1].step}")

    console.print("\n[bold]3  The same command once more[/bold]")
    resumed = digest_of(with_store)
    console.print(f"   digest {resumed}")

    console.print("\n[bold]What was saved[/bold]")
    saves = read_saves(log)
    console.print(table_of(saves))
    deltas = [save for save in saves if save.kind == "delta"]
    if deltas:
        share = sum(save.bytes for save in deltas) / sum(save.full_bytes for save in deltas)
        console.print(f"{len(deltas)} deltas take {share:.1%} of what as many full checkpoints would.")
    agree = uninterrupted == resumed
    verdict = "[bold green]The digests agree: every weight and optimizer state is the same, bit for bit.[/bold green]"
    console.print(verdict if agree else "[bold red]The digests differ.[/bold red]")
    console.print(f"[dim]{time.monotonic() - began:.0f} seconds[/dim]")
    return 0 if agree else 1


def digest_of(command: list[str]) -> str:
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return finished.stdout.splitlines()[-1].removeprefix("digest ")


def kill_in_the_middle(command: list[str], store: Path) -> bool:
    """Kill the process between two checkpoints; False if it ended before."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None and len(list(store.glob("manifests/*.json"))) < KILL_AFTER_CHECKPOINTS:
                time.sleep(0.02)
            time.sleep(0.3)
        finally:
            process.kill()
        code = process.wait()
    if code > 0:
        raise subprocess.CalledProcessError(code, command)
    return code < 0


if __name__ == "__main__":
    sys.exit(main())
