"""Measures what a failure costs (resume, and what was lost), and listing many checkpoints, as ratios within one run.

It must not know how anything is measured: each measure is a module of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
MEASURES = ("resume", "recovery", "ls")


def main(argv: list[str] | None = None) -> int:
    from save import quiet

    arguments = parse_arguments(argv)
    quiet()
    arguments.store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.store, prefix="resume-benchmark-") as folder:
        result = run(arguments, Path(folder))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {arguments.out}")
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_570_000, help="of all tables, about")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.02, help="of the rows that each delta of a chain carries")
    parser.add_argument("--deltas", default="1,5,20", help="chains of a base and so many deltas")
    parser.add_argument("--codec", default="raw", help="of the weights in the chains: raw, int8, int4, ...")
    parser.add_argument("--max-overhead", type=float, default=0.035, help="of Adaptive, and of its peer")
    parser.add_argument("--checkpoints", type=int, default=1000, help="that are listed")
    parser.add_argument("--threads", type=int, default=cores, help="of the training")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of A B A B, at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="least length of a window of training")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds, then a measure begins no more rounds")
    parser.add_argument("--only", default=",".join(MEASURES), help="of these, separated by commas")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "resume.json")
    arguments = parser.parse_args(argv)
    arguments.only = arguments.only.split(",")
    arguments.deltas = [int(n) for n in arguments.deltas.split(",")]
    if unknown := [name for name in arguments.only if name not in MEASURES]:
        parser.error(f"no such measure: {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    return arguments


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch
    from conditions import conditions
    from ls import measure_ls
    from plan import Plan
    from recovery import measure_recovery
    from replay import Chains, measure_resume
    from workload import OPTIMIZER, Training

    torch.set_num_threads(arguments.threads)
    facts = conditions(folder)
    begun = time.perf_counter()
    training = Training(rows=arguments.rows, dim=arguments.dim, batch=arguments.batch, share=arguments.share)
    say("model", begun)
    plan = Plan(training, folder, arguments.repeats, arguments.seconds, arguments.budget)
    facts |= {
        "rows": training.table_rows,
        "tables": len(training.sizes),
        "dim": arguments.dim,
        "optimizer": OPTIMIZER,
        "model_bytes": training.table_rows * (arguments.dim + 1) * 4,
        "batch": arguments.batch,
        "threads": arguments.threads,
        "page_cache": "warm",
        "repeats": arguments.repeats,
        "window_seconds": arguments.seconds,
    }
    measures = {
        "resume": lambda: measure_resume(plan, Chains(arguments.deltas, arguments.share, arguments.codec)),
        "recovery": lambda: measure_recovery(plan, arguments.max_overhead),
        "ls": lambda: measure_ls(folder, arguments.checkpoints, arguments.repeats, arguments.budget),
    }
    rows = []
    for name in arguments.only:
        begun = time.perf_counter()
        found = measures[name]()
        say(name, begun)
        for row in found:
            print(f"  {row.ratio:8.3f}  {row.what}", flush=True)
        rows += [row.as_json() for row in found]
    training.close()
    facts["load_average_at_the_end"] = os.getloadavg()[0]
    return {"created": datetime.now(UTC).isoformat(timespec="seconds"), "conditions": facts, "rows": rows}


def say(what: str, begun: float) -> None:
    print(f"{what}: {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
