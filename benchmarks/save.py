"""Measures what saving costs, as ratios within one run, and writes them with their conditions as JSON.

It must not know how anything is measured: each measure is a module of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
MIB = 1 << 20
# Memory comes first: later measures leave freed memory behind. The writes of the last ones disturb nobody.
MEASURES = ("memory", "tracking", "stall", "bytes", "base", "peers", "speed")


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    quiet()
    arguments.store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.store, prefix="save-benchmark-") as folder:
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
    parser.add_argument("--share", type=float, default=0.02, help="of the rows that change in an interval")
    parser.add_argument("--threads", type=int, default=cores, help="of the training")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of A B A B, at most")
    parser.add_argument("--seconds", type=float, default=10.0, help="least length of a window of training")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds, then a measure begins no more rounds")
    parser.add_argument("--only", default=",".join(MEASURES), help="of these, separated by commas")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "save.json")
    arguments = parser.parse_args(argv)
    arguments.only = arguments.only.split(",")
    if unknown := [name for name in arguments.only if name not in MEASURES]:
        parser.error(f"no such measure: {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    return arguments


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch
    from conditions import conditions
    from plan import Plan
    from workload import OPTIMIZER, Training

    torch.set_num_threads(arguments.threads)
    facts = conditions(folder)
    begun = time.perf_counter()
    training = Training(rows=arguments.rows, dim=arguments.dim, batch=arguments.batch, share=arguments.share)
    _say("model", begun)
    plan = Plan(training, folder, arguments.repeats, arguments.seconds, arguments.budget)
    facts |= {
        "rows": training.table_rows,
        "tables": len(training.sizes),
        "dim": arguments.dim,
        "optimizer": OPTIMIZER,
        "model_bytes": training.table_rows * (arguments.dim + 1) * 4,
        "batch": arguments.batch,
        "share": arguments.share,
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "window_seconds": arguments.seconds,
    }
    rows = []
    for name, measure in _measures().items():
        if name in arguments.only:
            begun = time.perf_counter()
            found = measure(plan)
            _say(name, begun)
            for row in found:
                print(f"  {row.ratio:8.3f}  {row.what}", flush=True)
            rows += [row.as_json() for row in found]
    training.close()
    facts["load_average_at_the_end"] = os.getloadavg()[0]
    return {"created": datetime.now(UTC).isoformat(timespec="seconds"), "conditions": facts, "rows": rows}


def _measures() -> Mapping[str, Any]:
    from memory import measure_memory
    from peers import measure_peers
    from sizes import measure_bytes
    from speed import measure_speed
    from stall import measure_base, measure_stall
    from tracking import measure_tracking

    found = {
        "memory": measure_memory,
        "tracking": measure_tracking,
        "stall": measure_stall,
        "bytes": measure_bytes,
        "base": measure_base,
        "peers": measure_peers,
        "speed": measure_speed,
    }
    return {name: found[name] for name in MEASURES}


def _say(what: str, begun: float) -> None:
    print(f"{what}: {time.perf_counter() - begun:.1f} s", flush=True)


def quiet() -> None:
    """TorchRec, FBGEMM, DDP and DCP warn of much that is meant."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    logging.getLogger("incremental_ckpt").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
