"""Makes docs/accuracy.md and its plots from the results of accuracy.py.

It must not train anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from accuracy import CODECS, RESTORES  # noqa: E402 - the path comes first
from accuracy_figures import ALLOWED_PERCENT, PUBLISHED, Change, Mean, Result, judged  # noqa: E402
from accuracy_optimizer_page import optimizer_section  # noqa: E402
from accuracy_text import at_most, percent  # noqa: E402

from incremental_ckpt.codecs import AutoCodec, codec_named  # noqa: E402
from incremental_ckpt.model import Field  # noqa: E402

_NAMES = {"criteo-1tb": "Criteo 1TB, 80,000 shuffled rows", "criteo-kaggle": "Criteo Kaggle, the first 10,001 rows"}
_INTRODUCTION = """# Accuracy

Written by `python benchmarks/accuracy_page.py` from `benchmarks/results/accuracy/*.json`; do not edit. What restores
from quantized checkpoints do to what a model learns: the example's DLRM on real Criteo rows, one pass over them,
interrupted at equal distances. At every interrupt a checkpoint is saved, all weights are overwritten with NaN, and a
new `Checkpointer` resumes from it, so that each restore puts back every row out of its record. Each run is compared
with the run of the same seed that was never interrupted. Dense parameters and all optimizer state are exact.

Run it on rows of your own (the rows are not part of this project):

```
python benchmarks/accuracy.py --data train.txt --out benchmarks/results/accuracy/NAME.json
python benchmarks/accuracy_page.py
```

Changes are in percent of the uninterrupted run, positive where it is *worse*: a higher loss, a lower AUC; the mean over
seeds, ± its standard error. A width **fails** where the change is worse than 0.01 % by more than two standard errors. A
width that does not fail is not thereby proved harmless: *at most* says what two standard errors do not rule out.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "accuracy")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "accuracy.md")
    arguments = parser.parse_args(argv)
    results = {path.stem: Result(json.loads(path.read_text())) for path in sorted(arguments.results.glob("*.json"))}
    plots = arguments.out.parent / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    from accuracy_plots import plot_changes, plot_errors  # matplotlib takes a second

    drawn = {}
    for name, result in results.items():
        drawn[name] = [f"accuracy-{name}-changes.svg", f"accuracy-{name}-errors.svg"]
        plot_changes(result, plots / drawn[name][0])
        plot_errors(result, plots / drawn[name][1])
    arguments.out.write_text(page(results, drawn))
    return 0


def page(results: Mapping[str, Result], plots: Mapping[str, Sequence[str]]) -> str:
    if not results:
        return _INTRODUCTION + "\nThere are no results yet.\n"
    parts = [_INTRODUCTION, "## What `auto` may pick\n", _verdicts(results)]
    parts += [_section(name, result, plots[name]) for name, result in results.items()]
    return "\n".join([*parts, optimizer_section()])


def _verdicts(results: Mapping[str, Result]) -> str:
    lines = [
        "| restores | width | data | seeds | loss worse by | at most | AUC worse by | at most | spread of loss, AUC "
        "| verdict |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    verdicts = judged(results.values())
    for restores, width in verdicts:
        for name, result in results.items():
            change = result.change(width, restores)
            if change is None:
                lines.append(f"| {restores} | `{width}` | {name} | 0 | | | | | | not run |")
                continue
            spread = f"{result.spread('loss'):.2f} %, {result.spread('auc'):.2f} %"
            lines.append(
                f"| {restores} | `{width}` | {name} | {change.loss.count} | {percent(change.loss)} "
                f"| {at_most(change.loss)} | {percent(change.auc)} | {at_most(change.auc)} | {spread} "
                f"| {_verdict(change)} |"
            )
    lines.append("")
    for restores in PUBLISHED:
        tried = {width: serves for (r, width), serves in verdicts.items() if r == restores}
        failing = "".join(f"`{width}` fails, " for width, serves in tried.items() if serves is False)
        picked = AutoCodec().codec_after(restores - 1)
        wrong = "" if tried.get(picked) else " all the same: its table is to be changed"
        lines.append(f"- {_times(restores)}: {failing}`auto` picks `{picked}`{wrong}.")
    lines.append(
        f"\nThe limit is {ALLOWED_PERCENT} %, for the loss and for the AUC: a width fails if one of them does. The "
        "first width of each number of restores is what Check-N-Run (NSDI'22) gives it. Beyond 20 restores nothing was "
        "run: `auto` stays with 8 bits."
    )
    return "\n".join(lines) + "\n"


def _verdict(change: Change) -> str:
    return "**fails**" if change.fails else "does not fail"


def _times(restores: int) -> str:
    return f"{restores} restores" if restores > 1 else "1 restore"


def _section(name: str, result: Result, plots: Sequence[str]) -> str:
    conditions, alone = result.conditions, result.uninterrupted
    loss, auc = (Mean.of([run[figure] for run in alone.values()]) for figure in ("loss", "auc"))
    parts = [
        f"## {_NAMES.get(name, name)}\n",
        f"{conditions['train_rows']:,} rows to train on, once, in batches of {conditions['batch']} "
        f"({conditions['steps']:,} steps); the last {conditions['held_out_rows']:,} rows of the file to judge by. "
        f"26 tables of {conditions['dim']} columns and at most {conditions['most_rows_per_table']:,} rows each, "
        f"{conditions['table_rows']:,} rows in all; row-wise Adagrad, learning rate {conditions['learning_rate']:g}; "
        "one thread; a base at every fourth checkpoint.\n",
        f"Uninterrupted, {len(alone)} seeds: loss {loss.mean:.5f}, AUC {auc.mean:.5f}. Spread between seeds (standard "
        f"deviation): {result.spread('loss'):.2f} % of the loss, {result.spread('auc'):.2f} % of the AUC.\n",
        _computed(result),
        _scatter(result),
        f"![change of the loss by restores](plots/{plots[0]})\n",
        "### Loss: worse by\n",
        _change_table(result, "loss"),
        "### AUC: worse by\n",
        _change_table(result, "auc"),
        "### Controls\n",
        _controls(result),
        "### Error and bytes per row\n",
        _error_table(result),
        f"![error by bytes](plots/{plots[1]})\n",
        "### Machine\n",
        f"{result.machine['cpu']}, Python {result.machine['python']}, "
        + ", ".join(f"{package} {version}" for package, version in result.machine["versions"].items())
        + f"; code {result.machine['commit']}.\n",
    ]
    return "\n".join(parts)


def _computed(result: Result) -> str:
    wanted = [(codec, restores) for codec in CODECS for restores in RESTORES if restores]
    seeds = [len(result.runs(*pair)) for pair in wanted]
    if all(seeds):
        return (
            f"Each of the {len(wanted)} pairs of a codec and a number of restores has been run with at least "
            f"{min(seeds)} seeds.\n"
        )
    return (
        f"Of the {len(wanted)} pairs of a codec and a number of restores, {seeds.count(0)} have not been run: their "
        "cells are empty, and nothing is said of them.\n"
    )


def _scatter(result: Result) -> str:
    changes = [result.change(codec, restores) for codec in result.codecs for restores in result.restores]
    means = [m for change in changes if change is not None for m in (change.loss,) if m.error]
    if not means:
        return ""
    low, high = (pick(m.deviation for m in means) for pick in (min, max))
    return (
        "A change of any bits sends training on another way, so that the loss changes with every codec and either way: "
        f"its changes scatter over seeds with a standard deviation of {low:.2f} to {high:.2f} %. Only more seeds or "
        "more rows would narrow what is known of their mean.\n"
    )


def _change_table(result: Result, figure: str) -> str:
    lines = [
        f"| codec | {' | '.join(_times(r) for r in result.restores)} |",
        f"|---|{'---:|' * len(result.restores)}",
    ]
    for codec in result.codecs:
        cells = []
        for restores in result.restores:
            change = result.change(codec, restores)
            same, runs = result.identical(codec, restores)
            if change is None:
                cells.append("")
            elif same == runs:
                cells.append(f"0, bit for bit ({runs})")
            else:
                mean: Mean = getattr(change, figure)
                cell = f"{percent(mean)} ({mean.count})"
                cells.append(f"**{cell}**" if mean.fails else cell)
        if any(cells):
            lines.append(f"| `{codec}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\nIn brackets: seeds. Bold: fails.\n"


def _controls(result: Result) -> str:
    lines = []
    same, runs = (sum(pair) for pair in zip(*(result.identical("raw", r) for r in result.restores), strict=True))
    lines.append(
        f"- `raw`: {same} of {runs} runs with restores end with the uninterrupted run's bits in every table, optimizer "
        "state and dense parameter."
    )
    saving = [result.identical(codec, 0) for codec in result.codecs]
    same, runs = (sum(pair) for pair in zip(*saving, strict=True))
    if runs:
        lines.append(
            f"- 0 restores: {same} of {runs} runs that save 20 times and are never resumed do so too, whatever the "
            "codec: the copy that is trained is never quantized."
        )
    return "\n".join(lines) + "\n"


def _error_table(result: Result) -> str:
    dim, most = result.conditions["dim"], max(result.restores)
    lines = [
        f"| codec | bytes of a record, {dim} columns | 64 columns | trained rows off by | untrained rows off by "
        f"| all checkpoints of a run, {most} restores / raw |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for codec in result.codecs:
        sizes = [codec_named(codec).record_bytes(Field("weight", "float32", width)) for width in (dim, 64)]
        errors = [result.error(codec, kind) for kind in ("trained", "as drawn")]
        cells = ["" if e is None else "0" if not e[0] else f"{e[0]:.2g} ({_significant(100 * e[1])} %)" for e in errors]
        share = result.bytes_to_raw(codec, most)
        lines.append(
            f"| `{codec}` | {sizes[0]} | {sizes[1]} | {' | '.join(cells)} | {'' if share is None else f'{share:.2f}'} |"
        )
    return "\n".join(lines) + (
        "\n\nOff by: the mean L2 norm of the difference that the first restore of a run makes to a row (of the runs "
        "with the fewest restores); in brackets as a share of the mean L2 norm of a row. All checkpoints of a run: "
        "with row ids, row-wise Adagrad (4 bytes a row), dense state and manifests.\n"
    )


def _significant(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
