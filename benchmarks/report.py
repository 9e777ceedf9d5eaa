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

from aims import AIMS, ResultRow

Result = Mapping[str, Any]

HERE = Path(__file__).parent
_INTRODUCTION = """# Benchmarks

Written by `python benchmarks/report.py` from `benchmarks/results/*.json`; do not edit. `make bench` measures the
targets on your machine, `make bench-full` all of this. Run them on an idle machine: one foreign busy process changes a
step tenfold.

Every figure is a quotient of two things measured in the same run, in turn (A B A B): the median over the repeats, with
the lower and the upper quartile. Seconds depend on the machine; they stand beside to show the order of magnitude.
"""
_TITLES = {
    "save": "Saving",
    "matrix-shares": "By the share of the rows that changed",
    "matrix-growth": "By the size of the model",
    "matrix-fewer-bytes": "Fewer bytes, full size",
    "matrix-kinds": "By kind of checkpoint and codec",
    "matrix-others": "Beside other checkpointers",
    "matrix-delta-tracker": "Beside TorchRec's delta tracker",
    "matrix-ranks": "By the number of ranks",
    "resume": "Resuming",
    "ranks": "Many ranks, simulated",
    "codecs": "Speed and size of codecs",
    "stores": "Stores beside boto3",
}
_HEADINGS = {
    "tracking": "Tracking",
    "stall": "Stall of a delta",
    "stall, by phase (a pass of its own)": "Where the stall goes",
    "base": "Stall of a base",
    "peers": "Against torch.distributed.checkpoint",
    "bytes": "Bytes of a delta",
    "speed": "Training speed while saving",
    "memory": "Peak memory",
    "compaction": "Compaction",
    "recovery": "Overhead and recovery",
    "stores": "Upload and download",
}
_IN_BRIEF = ("rows", "kinds_rows", "growth_rows", "ranks_rows", "dim", "optimizer", "share", "threads", "cores", "cpu")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "benchmarks.md")
    parser.add_argument("--plots", type=Path, help="folder of the figures; default: plots beside the page")
    arguments = parser.parse_args(argv)
    folder = arguments.plots or arguments.out.parent / "plots"
    results = read_results(arguments.results)
    from plots import draw

    captions = {f"{folder.name}/{name}": caption for name, caption in draw(results, folder).items()}
    arguments.out.write_text(page(results, captions))
    return 0


def read_results(folder: Path) -> dict[str, Result]:
    """By name, in the order of the page.

    Raises:
        ValueError: a file is no result.
    """
    results: dict[str, Result] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if not isinstance(result, dict) or not {"created", "conditions", "rows"} <= result.keys():
            raise ValueError(f"{path} is no result of a benchmark: created, conditions and rows are asked for")
        results[path.stem] = result
    order = list(_TITLES)
    return dict(sorted(results.items(), key=lambda item: order.index(_kind(item[0])) if _kind(item[0]) else len(order)))


def page(results: Mapping[str, Result], plots: Mapping[str, str] | None = None) -> str:
    """Args: results: by name, each as benchmarks/save.py writes it; plots: captions by path."""
    if not results:
        return _INTRODUCTION + "\nThere are no results yet.\n"
    shown = [f"![{caption}]({path})\n\n{caption}.\n" for path, caption in (plots or {}).items()]
    parts = [_INTRODUCTION, _targets(results), *shown, *(_section(name, result) for name, result in results.items())]
    return "\n".join(parts)


def _targets(results: Mapping[str, Result]) -> str:
    """One line for each thing aimed at, and why it was missed where it was."""
    lines = ["## Targets\n", "| what | measured | target | reached | measured in |", "|---|---:|---|---|---|"]
    missed = []
    for aim in AIMS:
        answers = aim.answers(results)
        if not answers:
            lines.append(f"| {aim.title} | not measured | | | |")
        for name, row in answers:
            reached = "yes" if row["reached"] else "**no**"
            lines.append(f"| {aim.title} | {_ratio(row['ratio'])} | {_target(row)} | {reached} | {_link(name)} |")
            if not row["reached"] and aim.reason not in missed:
                missed.append(f"- {aim.title}: {aim.reason or 'not looked into yet'}.")
    if missed:
        lines += ["", "Missed, and why:\n", *missed]
    return "\n".join(lines) + "\n"


def _kind(name: str) -> str:
    """Which benchmark a result is of: its name begins with it. Empty: none of those known."""
    return max((kind for kind in _TITLES if name == kind or name.startswith(f"{kind}-")), key=len, default="")


def _title(name: str) -> str:
    kind = _kind(name)
    if not kind:
        return name
    rest = name.removeprefix(kind).strip("-").replace("-", " ")
    return f"{_TITLES[kind]} ({rest})" if rest else _TITLES[kind]


def _link(name: str) -> str:
    """As GitHub makes anchors of headings."""
    title = _title(name)
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return f"[{title}](#{kept.replace(' ', '-')})"


def _section(name: str, result: Result) -> str:
    rows = result["rows"]
    aimed = [row for row in rows if row["target"] is not None]
    reached = sum(row["reached"] for row in aimed)
    parts = [f"## {_title(name)}\n", _in_brief(result)]
    if aimed:
        parts += ["", f"{reached} of {len(aimed)} targets reached."]
    details: list[str] = []
    for measure in dict.fromkeys(row["measure"] for row in rows):
        of_measure = [row for row in rows if row["measure"] == measure]
        parts += ["", f"### {_HEADINGS.get(measure, measure[:1].upper() + measure[1:])}\n", _shaped(of_measure)]
        details += _details(of_measure)
    parts += ["", _folded("Parts of the quotients", "\n".join(details))] if details else []
    parts += ["", _folded("Conditions", _conditions(result))]
    return "\n".join(parts) + "\n"


def _in_brief(result: Result) -> str:
    known = result["conditions"]
    return ", ".join(f"{_words(key)} {_quantity(key, known[key])}" for key in _IN_BRIEF if key in known) + "."


def _folded(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def _shaped(rows: Sequence[ResultRow]) -> str:
    if all("phase_seconds" in row["details"] for row in rows):
        return _phase_table(rows)
    return _kind_table(rows) if all("kind" in row["details"] for row in rows) else _table(rows)


def _table(rows: Sequence[ResultRow]) -> str:
    lines = ["| what | measured | quartiles | repeats | target | reached |", "|---|---:|---:|---:|---|---|"]
    for row in rows:
        low, high = row["quartiles"]
        reached = {True: "yes", False: "**no**", None: ""}[row["reached"]]
        lines.append(
            f"| {row['what']} | {_ratio(row['ratio'])} | {_ratio(low)} – {_ratio(high)} | {row['repeats']} "
            f"| {_target(row)} | {reached} |"
        )
    return "\n".join(lines)


def _details(rows: Sequence[ResultRow]) -> list[str]:
    """The parts of each quotient that are in no table."""
    lines = []
    for row in rows:
        if "phase_seconds" in row["details"] or "kind" in row["details"]:
            continue
        told = ", ".join(f"{_words(key)} {_quantity(key, value)}" for key, value in row["details"].items())
        if told:
            lines.append(f"- {row['what']}: {told}")
    return lines


def _kind_table(rows: Sequence[ResultRow]) -> str:
    """One line per kind and codec, one column per share."""
    shares = list(dict.fromkeys(row["details"]["wanted_share"] for row in rows))
    lines = [
        f"{rows[0]['what'].partition(': ')[2]}; bases after the first one in brackets.\n",
        "| kind | codec | " + " | ".join(f"{share:.1%} changed" for share in shares) + " |",
        "|---|---|" + "---:|" * len(shares),
    ]
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        details = row["details"]
        cell = f"{_ratio(row['ratio'])} ({details['bases']})" if details["bases"] else _ratio(row["ratio"])
        cells.setdefault((details["kind"], details["codec"]), []).append(cell)
    lines += [f"| {kind} | {codec} | " + " | ".join(found) + " |" for (kind, codec), found in cells.items()]
    return "\n".join(lines)


def _phase_table(rows: Sequence[ResultRow]) -> str:
    lines = ["| phase | time | / bare index_select | quartiles |", "|---|---:|---:|---:|"]
    for row in rows:
        low, high = row["quartiles"]
        time = _quantity("phase_seconds", row["details"]["phase_seconds"])
        lines.append(f"| {row['what']} | {time} | {_ratio(row['ratio'])} | {_ratio(low)} – {_ratio(high)} |")
    return "\n".join(lines)


def _conditions(result: Result) -> str:
    lines = ["| | |", "|---|---|", f"| created | {result['created']} |"]
    for key, value in result["conditions"].items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else _quantity(key, value)
        lines.append(f"| {_words(key)} | {text} |")
    return "\n".join(lines)


def _target(row: ResultRow) -> str:
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
    if (key.endswith("bytes") and key != "row_bytes") or key in ("bytes_per_save",):
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
