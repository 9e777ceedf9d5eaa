"""Measures what saving costs, as ratios within one run, and writes them with their conditions as JSON.

It must not know how anything is measured: each measure is a module of its own.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import Measures, add_training, measure_training, quiet, script_parser, write_result

if TYPE_CHECKING:
    from plan import Plan

# Memory comes first: later measures leave freed memory behind. The writes of the last ones disturb nobody.
MEASURES = ("memory", "tracking", "stall", "bytes", "base", "peers", "speed")


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    quiet()
    write_result(arguments, "save", run)
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "save.json", "--store")
    add_training(parser, MEASURES, repeats=7, seconds=10.0)
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return measure_training(arguments, folder, _measures, share=arguments.share)


def _measures(plan: Plan) -> Measures:
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
    return {name: partial(found[name], plan) for name in MEASURES}


if __name__ == "__main__":
    sys.exit(main())
