"""The plots of docs/accuracy.md.

It must not compute figures: accuracy_figures.py does.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from accuracy_figures import ALLOWED_PERCENT, Mean, Result
from matplotlib.figure import Figure

from incremental_ckpt.codecs import codec_named
from incremental_ckpt.model import Field

_STYLE = {"svg.hashsalt": "incremental_ckpt", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
_COLOURS = {
    "raw": "#777777", "fp16": "#66a61e", "bf16": "#1b9e77", "int8": "#7570b3", "int4": "#1f78b4", "int3": "#e6ab02",
    "int2": "#d95f02",
}  # fmt: skip


def plot_changes(result: Result, path: Path) -> None:
    """Loss and AUC by restores, side by side for each codec; ringed where a width fails."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9.5, 3.6), layout="constrained")
        panels = figure.subplots(1, 2)
        codecs = [c for c in result.codecs if c != "raw"]
        for panel, measure, name in zip(panels, ("loss", "auc"), ("loss", "AUC"), strict=True):
            spread = result.spread(measure)
            panel.axhspan(-spread, spread, color="#eeeeee", label="± spread between seeds")
            panel.axhline(0, color="#777777", linewidth=0.8)
            panel.axhline(ALLOWED_PERCENT, color="#aa0000", linewidth=0.8, linestyle="--", label=f"{ALLOWED_PERCENT} %")
            for place, codec in enumerate(codecs):
                shift = (place - (len(codecs) - 1) / 2) * 0.11
                for x, restores in enumerate(result.restores):
                    change = result.change(codec, restores)
                    if change is None:
                        continue
                    mean: Mean = getattr(change, measure)
                    panel.errorbar(
                        x + shift, mean.mean, yerr=2 * (mean.error or 0), fmt="o", linewidth=1.2,
                        color=_COLOURS[codec], markersize=6.5 if mean.fails else 4,
                        markeredgecolor="black" if mean.fails else _COLOURS[codec],
                    )  # fmt: skip
            panel.set_xticks(range(len(result.restores)), [str(r) for r in result.restores])
            panel.set_xlim(-0.5, len(result.restores) - 0.5)
            panel.set_xlabel("restores")
            panel.set_ylabel(f"{name} worse by, %")
        for codec in codecs:
            panels[0].plot([], [], "o", color=_COLOURS[codec], markersize=4, label=codec)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
        figure.suptitle("Mean over seeds, bars of two standard errors; ringed: fails", fontsize=9)
        figure.savefig(path, metadata={"Date": None})


def plot_errors(result: Result, path: Path) -> None:
    """What a row is off by, against the bytes of its record."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        panel = figure.subplots()
        field = Field("weight", "float32", result.conditions["dim"])
        for kind, marker in (("trained", "o"), ("as drawn", "s")):
            for codec in result.codecs:
                error = result.error(codec, kind)
                if error is None or not error[0]:
                    continue
                size = codec_named(codec).record_bytes(field)
                panel.plot(
                    size,
                    100 * error[1],
                    marker,
                    color=_COLOURS[codec],
                    fillstyle="full" if kind == "trained" else "none",
                )
                if kind == "trained":
                    panel.annotate(codec, (size, 100 * error[1]), xytext=(6, 2), textcoords="offset points")
            panel.plot([], [], marker, color="black", fillstyle="full" if kind == "trained" else "none",
                       label="trained rows" if kind == "trained" else "untrained rows")  # fmt: skip
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_xlim(0, field.row_bytes)
        panel.set_xlabel(f"bytes of a record, {field.width} columns (raw: {field.row_bytes})")
        panel.set_ylabel("off by, % of the row's L2 norm")
        panel.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})
