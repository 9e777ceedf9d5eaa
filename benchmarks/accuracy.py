"""Measures what restores from quantized checkpoints do to what a model learns, against the run of the same seed that is
never interrupted.

Runs are added to a result one by one, so that it can be made in pieces. It must not judge them: accuracy_page.py does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

CODECS = ("raw", "fp16", "bf16", "int8", "int4", "int3", "int2")
ADAM_CODECS = ("raw", "bf16", "fp16", "int8", "int8+bf16")
"""Of both moments, or of the first and of the second; other than raw and bf16 the checkpointer takes none of them."""
RESTORES = (0, 1, 3, 10, 20)
_UNINTERRUPTED: tuple[str | None, int] = (None, 0)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Criteo TSV (Kaggle layout) or parquet")
    parser.add_argument("--out", type=Path, required=True, help="a result; runs that it lacks are added")
    parser.add_argument("--seeds", type=int, default=5, help="runs of every kind, with seeds from 0 on")
    parser.add_argument(
        "--optimizer", choices=("row-wise-adagrad", "adam"), default="row-wise-adagrad",
        help="of the tables; with adam --codecs are those of its moments, and weights are exact",
    )  # fmt: skip
    parser.add_argument("--codecs", nargs="+", help=f"default: all; adam: {', '.join(ADAM_CODECS)}")
    parser.add_argument("--restores", nargs="+", type=int, default=RESTORES)
    parser.add_argument("--train-rows", type=int, default=70_000, help="at most")
    parser.add_argument("--held-out-rows", type=int, default=10_000, help="the last of the file")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--embedding-dim", type=int, default=16)
    parser.add_argument("--max-rows-per-table", type=int, default=20_000)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run later than this")
    arguments = parser.parse_args(argv)
    known = ADAM_CODECS if arguments.optimizer == "adam" else CODECS
    arguments.codecs = arguments.codecs or known
    if unknown := set(arguments.codecs) - set(known):
        parser.error(f"--codecs: {', '.join(sorted(unknown))}: with {arguments.optimizer} it takes {', '.join(known)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    begun = time.monotonic()
    arguments = parse_arguments(argv)
    _quiet()
    from accuracy_optimizer_run import adam_learner
    from accuracy_run import Conditions, Rows, Run, Wanted, fused_learner
    from conditions import conditions as machine
    from dlrm_model import start_processes

    rows = Rows(
        arguments.data, arguments.train_rows, arguments.held_out_rows, arguments.batch_size,
        arguments.max_rows_per_table,
    )  # fmt: skip
    conditions = Conditions(
        rows.train_rows, arguments.held_out_rows, arguments.batch_size, arguments.embedding_dim,
        arguments.max_rows_per_table, arguments.lr,
    )  # fmt: skip
    adam = arguments.optimizer == "adam"
    make = adam_learner if adam else fused_learner
    facts = {**asdict(conditions), "steps": conditions.steps, "table_rows": sum(rows.table_sizes)}
    result = _opened(arguments.out, {**facts, "optimizer": "adam"} if adam else facts)
    missing = list(_missing(arguments, result))
    device = start_processes()
    for number, (seed, codec, restores) in enumerate(missing):
        if time.monotonic() - begun > arguments.seconds:
            print(f"{len(missing) - number} runs are left")
            return 0
        started = time.monotonic()
        learned = Run(conditions, Wanted(seed, codec, restores), rows, device, make).learn()
        result["runs"].append({"seed": seed, "codec": codec, "restores": restores, **learned.as_json()})
        result["machine"] = machine(Path(tempfile.gettempdir()))
        _write(arguments.out, result)
        print(
            f"seed {seed}, {codec or 'not saved'}, {restores} restores: loss {learned.loss:.6f}, AUC {learned.auc:.6f} "
            f"({time.monotonic() - started:.1f} s)",
            flush=True,
        )
    print("all runs are there")
    return 0


def _missing(arguments: argparse.Namespace, result: dict[str, Any]) -> Iterator[tuple[int, str | None, int]]:
    """Seed by seed, so that a result broken off is whole for those that it has."""
    present = {(run["seed"], run["codec"], run["restores"]) for run in result["runs"]}
    for seed in range(arguments.seeds):
        wanted = [(seed, *_UNINTERRUPTED)]
        wanted += [(seed, codec, restores) for restores in arguments.restores for codec in arguments.codecs]
        yield from (run for run in wanted if run not in present)


def _opened(path: Path, conditions: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError where the result was begun under other conditions."""
    if not path.exists():
        return {"conditions": conditions, "runs": []}
    found: dict[str, Any] = json.loads(path.read_text())
    if found["conditions"] != conditions:
        raise ValueError(f"{path} was begun with {found['conditions']}, not {conditions}; give another --out")
    return found


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(path)


def _quiet() -> None:
    """What the example does of its own: TorchRec, FBGEMM and DDP warn of much that is meant."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.append(str(HERE.parent / "examples"))
    from dlrm_criteo import _quiet as quiet

    quiet()


if __name__ == "__main__":
    raise SystemExit(main())
