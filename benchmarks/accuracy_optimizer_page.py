"""The section of docs/accuracy.md on the optimizer's rows, from the results of ``accuracy.py --optimizer adam``.

It must not train anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accuracy import ADAM_CODECS
from accuracy_figures import ALLOWED_PERCENT, Mean, Result
from accuracy_text import at_most, percent

from incremental_ckpt.codecs import codec_for
from incremental_ckpt.codecs.chosen import OPTIMIZER_CODECS
from incremental_ckpt.model import Field

RESULTS = Path(__file__).parent / "results" / "accuracy-adam"
_NAMES = {"criteo-1tb": "Criteo 1TB", "criteo-kaggle": "Criteo Kaggle"}
_MOST_UPDATE = 1.1
"""Times that of an exact restore."""


def optimizer_section(folder: Path = RESULTS) -> str:
    """Markdown; empty where nothing was run."""
    found = {path.stem: Result(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))}
    if not found:
        return ""
    parts = [_introduction(next(iter(found.values())).conditions), _table(found)]
    parts += [_data(name, result) for name, result in found.items()]
    return "\n".join(parts)


def _introduction(conditions: Mapping[str, Any]) -> str:
    return f"""## Optimizer rows: what `optimizer_codec` may be

Written from `benchmarks/results/accuracy-adam/*.json`, which `accuracy.py --optimizer adam` makes. The same DLRM on the
same rows, but its tables are `nn.EmbeddingBag`s trained by `SparseAdam` (learning rate {conditions["learning_rate"]}):
FBGEMM has no Adam on the CPU. Weights are exact; the codec is that of Adam's two moments, `int8+bf16` that of the first
and that of the second. Codecs that the `Checkpointer` refuses are applied to the moments after an exact restore, which
comes to the same. *First update*: the most that the first step after the first restore moves any weight by, over that
after an exact restore of the same seed; the least and the largest of the seeds that were run with `raw` as well. Beyond
{_MOST_UPDATE} it **fails**, as does a loss or an AUC that is worse by more than {ALLOWED_PERCENT} % and two standard
errors.
"""


def _table(found: Mapping[str, Result]) -> str:
    lines = [
        "| codec | bytes of both moments, 64 columns | restores | data | seeds | first update "
        "| loss worse by | at most | AUC worse by | at most | verdict |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for codec in ADAM_CODECS[1:]:
        for restores in sorted({r for result in found.values() for r in result.restores}):
            for name, result in found.items():
                change = result.change(codec, restores)
                if change is None:
                    continue
                updates = first_updates(result, codec, restores)
                fails = change.fails or max(updates, default=0) > _MOST_UPDATE
                lines.append(
                    f"| `{codec}` | {_bytes(codec)} | {restores} | {name} | {change.loss.count} "
                    f"| {f'{_times(min(updates))} – {_times(max(updates))}' if updates else ''} "
                    f"| {percent(change.loss)} | {at_most(change.loss)} | {percent(change.auc)} "
                    f"| {at_most(change.auc)} | {'**fails**' if fails else 'does not fail'} |"
                )
    offered = " and ".join(f"`{codec}`" for codec in ADAM_CODECS if codec in OPTIMIZER_CODECS)
    return "\n".join(lines) + (
        f"\n\nThe `Checkpointer` takes {offered}. The others are refused, whether real rows of this size show why or "
        "not: what they make of rows whose elements differ more is in "
        "[ADR 10](adr/0010-optimizer-rows-are-exact-or-bf16.md).\n"
    )


def first_updates(result: Result, codec: str, restores: int) -> list[float]:
    """The largest first update over that of an exact restore, per seed."""
    exact = result.runs("raw", restores)
    runs = result.runs(codec, restores)
    return [run["first_update"] / exact[seed]["first_update"] for seed, run in runs.items() if seed in exact]


def _bytes(codec: str) -> int:
    first, second = codec.split("+") if "+" in codec else (codec, codec)
    field = Field("exp_avg", "float32", 64)
    return sum(codec_for(name, field).record_bytes(field) for name in (first, second))


def _data(name: str, result: Result) -> str:
    conditions, alone = result.conditions, result.uninterrupted
    loss, auc = (Mean.of([run[figure] for run in alone.values()]) for figure in ("loss", "auc"))
    same, runs = (sum(pair) for pair in zip(*(result.identical("raw", r) for r in result.restores), strict=True))
    most = max(result.restores)
    share = result.bytes_to_raw("bf16", most)
    sentences = [
        f"{_NAMES.get(name, name)}: {conditions['train_rows']:,} rows to train on in batches of {conditions['batch']}, "
        f"{conditions['held_out_rows']:,} to judge by, tables of {conditions['dim']} columns.",
        f"Uninterrupted, {loss.count} seeds: loss {loss.mean:.5f}, AUC {auc.mean:.5f}; spread between seeds "
        f"{result.spread('loss'):.2f} % and {result.spread('auc'):.2f} %.",
        f"`raw`: {same} of {runs} runs end with the uninterrupted run's bits." if runs else "",
        f"All checkpoints of a run of {most} restores take {share:.2f} of `raw` with `bf16`." if share else "",
        f"{result.machine['cpu']}, torch {result.machine['versions']['torch']}.\n",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _times(ratio: float) -> str:
    return f"{ratio:.3f}x" if ratio < 10 else f"{ratio:.0f}x"
