"""Measures what a failure costs (resume, and what was lost), and listing many checkpoints, as ratios within one run.

It must not know how anything is measured: each measure is a module of its own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import Measures, add_training, measure_training, quiet, script_parser, write_result

if TYPE_CHECKING:
    from plan import Plan

MEASURES = ("resume", "recovery", "ls")


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    quiet()
    write_result(arguments, "resume", run)
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "resume.json", "--store")
    add_training(parser, MEASURES, repeats=5, seconds=20.0)
    parser.add_argument("--deltas", type=_numbers, default="1,5,20", help="chains of a base and so many deltas")
    parser.add_argument("--codec", default="raw", help="of the weights in the chains: raw, int8, int4, ...")
    parser.add_argument("--max-overhead", type=float, default=0.035, help="of Adaptive, and of its peer")
    parser.add_argument("--checkpoints", type=int, default=1000, help="that are listed")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from ls import measure_ls
    from recovery import measure_recovery
    from replay import Chains, measure_resume

    def measures(plan: Plan) -> Measures:
        return {
            "resume": lambda: measure_resume(plan, Chains(arguments.deltas, arguments.share, arguments.codec)),
            "recovery": lambda: measure_recovery(plan, arguments.max_overhead),
            "ls": lambda: measure_ls(folder, arguments.checkpoints, arguments.repeats, arguments.budget),
        }

    return measure_training(arguments, folder, measures, page_cache="warm")


if __name__ == "__main__":
    sys.exit(main())
