"""Measures saves along shares, sizes, kinds, codecs, ranks and other checkpointers; one result of JSON per measure.

It must not know how anything is measured: each measure is a module of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from save import quiet

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
_ALWAYS = ("dim", "batch", "threads", "repeats")
MEASURES = {  # module, function, and which of the sizes matter
    "shares": ("shares", "measure_shares", ("rows", "shares")),
    "growth": ("growth", "measure_growth", ("growth_rows", "changed")),
    "fewer-bytes": ("kinds", "measure_fewer_bytes", ("rows",)),
    "kinds": ("kinds", "measure_kinds", ("kinds_rows", "shares", "intervals", "codecs")),
    "others": ("others", "measure_others", ("rows",)),
    "delta-tracker": ("delta_tracker", "measure_delta_tracker", ("rows",)),
    "ranks": ("gloo", "measure_ranks", ("ranks_rows", "ranks")),
}


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    quiet()
    arguments.store.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        with tempfile.TemporaryDirectory(dir=arguments.store, prefix="matrix-benchmark-") as folder:
            result = run(arguments, name, Path(folder))
        path = arguments.out / f"matrix-{name}-{arguments.name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}", flush=True)
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", type=_names, default=",".join(MEASURES), help="of these, separated by commas")
    parser.add_argument("--rows", type=int, default=10_570_000, help="of all tables, about; smaller models are capped")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=cores, help="of the training")
    parser.add_argument("--shares", type=_floats, default="0.005,0.02,0.1,0.26", help="of rows that change")
    parser.add_argument("--kinds-rows", type=int, default=400_000, help="of the model for kinds and codecs")
    parser.add_argument("--intervals", type=int, default=6, help="of each kind and codec")
    parser.add_argument("--codecs", type=_names, default="raw,int8,int4,int2", help="that kinds are combined with")
    parser.add_argument("--growth-rows", type=_integers, default="1000000,10000000,50000000", help="as far as they fit")
    parser.add_argument("--changed", type=int, default=200_000, help="rows that change whatever the size")
    parser.add_argument("--ranks", type=_integers, default="1,2,4", help="processes that share the model")
    parser.add_argument("--ranks-rows", type=int, default=2_000_000, help="of their model")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of A B A B, at most")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds, then a measure begins no more rounds")
    parser.add_argument("--normal-priority", action="store_true", help="of the background: for tests on busy machines")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder")
    parser.add_argument("--name", default=f"{cores}-cores", help="of the machine, in the names of the results")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.only if name not in MEASURES]:
        parser.error(f"no such measure: {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    return arguments


def run(arguments: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    import torch
    from conditions import conditions
    from plan import Matrix
    from workload import OPTIMIZER

    torch.set_num_threads(arguments.threads)
    facts = conditions(folder)
    matrix = Matrix(
        rows=arguments.rows, dim=arguments.dim, batch=arguments.batch, threads=arguments.threads,
        shares=tuple(arguments.shares), kinds_rows=min(arguments.rows, arguments.kinds_rows),
        intervals=arguments.intervals, codecs=tuple(arguments.codecs),
        growth_rows=tuple(arguments.growth_rows), changed=arguments.changed,
        ranks_rows=min(arguments.rows, arguments.ranks_rows), ranks=tuple(arguments.ranks), folder=folder,
        repeats=arguments.repeats, budget=arguments.budget, low_priority=not arguments.normal_priority,
    )  # fmt: skip
    module, function, sizes = MEASURES[name]
    measure: Callable[[Matrix], Sequence[Any]] = getattr(import_module(module), function)
    begun = time.perf_counter()
    rows = measure(matrix)
    print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)
    for row in rows:
        print(f"  {row.ratio:8.3f}  {row.what}", flush=True)
    asked = {key: _plain(value) for key, value in asdict(matrix).items() if key in (*sizes, *_ALWAYS)}
    facts |= asked | {"optimizer": OPTIMIZER, "load_average_at_the_end": os.getloadavg()[0]}
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "conditions": facts,
        "rows": [row.as_json() for row in rows],
    }


def _plain(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    said = {int: "{:,}", float: "{:.1%}", str: "{}"}
    return ", ".join(said[type(each)].format(each) for each in value)


def _names(text: str) -> list[str]:
    return text.split(",")


def _integers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _floats(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
