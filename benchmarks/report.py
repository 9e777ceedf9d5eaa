"""Makes docs/benchmarks.md from the results: every figure with target, spread and conditions, reached or not.

It must not measure anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_INTRODUCTION = """# Benchmarks

Written by `python benchmarks/report.py` from `benchmarks/results/*.json`; do not edit. Run one yourself:

```
python benchmarks/save.py --store DIR --out benchmarks/results/NAME.json
python benchmarks/report.py
```

It takes about 8 minutes, 12 GB of memory and 10 GB of disk. Run it on an idle machine: one foreign busy process changes
a step tenfold.

Every figure is a quotient of two things measured in the same run, in turn (A B A B): the median over the repeats, with
the lower and the upper quartile. Seconds depend on the machine; they stand beside to show the order of magnitude.
"""
_HEADINGS = {
    "tracking": "Tracking",
    "stall": "Stall of a delta",
    "stall, by phase (a pass of its own)": "Where the stall goes",
    "base": "Stall of a base",
    "peers": "Against torch.distributed.checkpoint",
    "bytes": "Bytes of a delta",
    "speed": "Training speed while saving",
    "memory": "Peak memory",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "benchmarks.md")
    arguments = parser.parse_args(argv)
    results = {path.stem: json.loads(path.read_text()) for path in sorted(arguments.results.glob("*.json"))}
    arguments.out.write_text(page(results))
    return 0


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Args: results: by name, each as benchmarks/save.py writes it."""
    if not results:
        return _INTRODUCTION + "\nThere are no results yet.\n"
    return "\n".join([_INTRODUCTION, *(_section(name, result) for name, result in results.items())])


def _section(name: str, result: Mapping[str, Any]) -> str:
    rows = result["rows"]
    aimed = [row for row in rows if row["target"] is not None]
    missed = [row for row in aimed if not row["reached"]]
    parts = [f"## {name}\n", f"{len(aimed) - len(missed)} of {len(aimed)} targets reached."]
    parts += [f"- missed: {row['what']}: {_ratio(row['ratio'])}, {_target(row)}" for row in missed]
    for measure in dict.fromkeys(row["measure"] for row in rows):
        of_measure = [row for row in rows if row["measure"] == measure]
        table = _phase_table if all("phase_seconds" in row["details"] for row in of_measure) else _table
        parts += ["", f"### {_HEADINGS.get(measure, measure)}\n", table(of_measure)]
    parts += ["", "### Conditions\n", _conditions(result)]
    return "\n".join(parts) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| what | measured | quartiles | repeats | target | reached |", "|---|---:|---:|---:|---|---|"]
    for row in rows:
        low, high = row["quartiles"]
        reached = {True: "yes", False: "**no**", None: ""}[row["reached"]]
        lines.append(
            f"| {row['what']} | {_ratio(row['ratio'])} | {_ratio(low)} – {_ratio(high)} | {row['repeats']} "
            f"| {_target(row)} | {reached} |"
        )
    lines.append("")
    for row in rows:
        told = ", ".join(f"{_words(key)} {_quantity(key, value)}" for key, value in row["details"].items())
        if told:
            lines.append(f"- {row['what']}: {told}")
    return "\n".join(lines)


def _phase_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| phase | time | / bare index_select | quartiles |", "|---|---:|---:|---:|"]
    for row in rows:
        low, high = row["quartiles"]
        time = _quantity("phase_seconds", row["details"]["phase_seconds"])
        lines.append(f"| {row['what']} | {time} | {_ratio(row['ratio'])} | {_ratio(low)} – {_ratio(high)} |")
    return "\n".join(lines)


def _conditions(result: Mapping[str, Any]) -> str:
    lines = ["| | |", "|---|---|", f"| created | {result['created']} |"]
    for key, value in result["conditions"].items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else _quantity(key, value)
        lines.append(f"| {_words(key)} | {text} |")
    return "\n".join(lines)


def _target(row: Mapping[str, Any]) -> str:
    return "" if row["target"] is None else f"{row['target']['bound']} {row['target']['value']:g}"


def _ratio(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _words(key: str) -> str:
    for unit in ("_bytes_per_second", "_seconds", "_bytes"):
        if key.endswith(unit) and key != unit.removeprefix("_"):
            key = key.removesuffix(unit)
            break
    return key.replace("_", " ")


def _quantity(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if key.endswith("bytes_per_second"):
        return f"{value / 1e6:,.0f} MB/s"
    if (key.endswith("bytes") and key != "row_bytes") or key == "bytes_per_save":
        return f"{value / 1e6:,.1f} MB" if value >= 1e5 else f"{value / 1e3:,.1f} kB"
    if key.endswith("_per_second"):
        return f"{value:,.3g}"
    if key.endswith("seconds"):
        return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.2f} ms"
    if key.endswith("share"):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"


if __name__ == "__main__":
    sys.exit(main())
