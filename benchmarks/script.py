"""What every benchmark script does around its measures: its arguments, a folder on the disk to be measured, its result.

It must not know what is measured.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

if TYPE_CHECKING:
    from plan import Plan
    from rows import Row

Measures = Mapping[str, Callable[[], Sequence["Row"]]]


def script_parser(description: str | None, out: str, place: str = "--folder") -> argparse.ArgumentParser:
    """Args: out: name of the result. place: the option that says where to measure."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    disk = Path(tempfile.gettempdir())
    parser.add_argument(place, dest="folder", type=Path, default=disk, help="on the disk to be measured")
    parser.add_argument("--out", type=Path, default=HERE / "results" / out)
    return parser


def add_training(parser: argparse.ArgumentParser, measures: Sequence[str], *, repeats: int, seconds: float) -> None:
    """Options of a script that measures one training in several ways."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in measures]:
            raise argparse.ArgumentTypeError(f"no such measure: {', '.join(unknown)}; there are {', '.join(measures)}")
        return names

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--rows", type=int, default=10_570_000, help="of all tables, about")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.02, help="of the rows that change in an interval")
    parser.add_argument("--threads", type=int, default=cores, help="of the training")
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds of A B A B, at most")
    parser.add_argument("--seconds", type=float, default=seconds, help="least length of a window of training")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds, then a measure begins no more rounds")
    parser.add_argument("--only", type=chosen, default=",".join(measures), help="of these, separated by commas")


def quiet() -> None:
    """TorchRec, FBGEMM, DDP and DCP warn of much that is meant."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    logging.getLogger("incremental_ckpt").setLevel(logging.ERROR)


def write_result(
    arguments: argparse.Namespace, name: str, run: Callable[[argparse.Namespace, Path], dict[str, Any]]
) -> None:
    """Run in an empty folder on the disk to be measured."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix=f"{name}-benchmark-") as folder:
        result = run(arguments, Path(folder))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {arguments.out}")


def result_of(facts: Mapping[str, Any], rows: Iterable[Row]) -> dict[str, Any]:
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "conditions": {**facts, "load_average_at_the_end": os.getloadavg()[0]},
        "rows": [row.as_json() for row in rows],
    }


def measure_training(
    arguments: argparse.Namespace, folder: Path, measures_of: Callable[[Plan], Measures], **more_facts: object
) -> dict[str, Any]:
    """The chosen ones of the measures, in their order, of one training."""
    import torch
    from conditions import conditions
    from plan import Plan
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
        **more_facts,
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "window_seconds": arguments.seconds,
    }
    rows: list[Row] = []
    for name, measure in measures_of(plan).items():
        if name in arguments.only:
            begun = time.perf_counter()
            found = measure()
            say(name, begun)
            show(found)
            rows += found
    training.close()
    return result_of(facts, rows)


def show(rows: Iterable[Row]) -> None:
    for row in rows:
        print(f"  {row.ratio:8.3f}  {row.what}", flush=True)


def say(what: str, begun: float) -> None:
    print(f"{what}: {time.perf_counter() - begun:.1f} s", flush=True)
