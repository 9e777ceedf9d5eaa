"""Draws what tables show badly: figures of the results, as SVG files.

It must not measure anything, nor know the page that shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

ResultRow = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Any]]
# Distinct for all kinds of sight (Okabe and Ito).
_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY, _SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555", "#56B4E9"
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "plots",  # the same figures give the same file
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}
_CODECS = {"raw": _GREY, "int8": _BLUE, "int4": _GREEN, "int2": _ORANGE}


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Write the figures for which there are results.

    Returns:
        Captions by file name, in the order of the page.
    """
    captions = {}
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
        for name, make in _FIGURES.items():
            found = make(results)
            if found is None:
                (folder / name).unlink(missing_ok=True)
                continue
            figure, captions[name] = found
            figure.savefig(folder / name, metadata={"Date": None, "Creator": None})
    return captions


Drawn = tuple[Figure, str] | None


def stall_by_share(results: Results) -> Drawn:
    stalls = list(_rows(results, "stall by share"))
    durable = list(_rows(results, "time to durable"))
    if not stalls:
        return None
    figure, (left, right) = _figure(10, 4.6, 2)
    _line(left, stalls, "share", "stall_seconds", "a raw delta", _BLUE)
    limits = "limit: bare index_select (left), write + fsync (right)"
    _line(left, stalls, "share", "bare_seconds", limits, _BLUE, dashed=True)
    _line(right, durable, "share", "durable_seconds", "a raw delta", _BLUE)
    _line(right, durable, "share", "write_seconds", limits, _BLUE, dashed=True)
    colours = [_SKY, _GREY, _ORANGE, _GREEN, _PURPLE]
    for axes, measure, key in (
        (left, "other checkpointers, stall", "stall_seconds"),
        (right, "other checkpointers, time to durable", "durable_seconds"),
    ):
        beside_a_delta = [row for row in _rows(results, measure) if row["what"].endswith("ours")]
        unique = {row["details"]["checkpointer"]: row for row in beside_a_delta}
        for (name, row), colour in zip(unique.items(), colours, strict=False):
            axes.axhline(row["details"][key], color=colour, linewidth=1.4, label=f"{name} (all rows)")
        _log(axes, "rows changed since the last save (log scale)")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.2g} %"))
        axes.set_ylabel("time (log scale)")
        axes.set_xticks([row["details"]["share"] for row in stalls])
        axes.yaxis.set_major_formatter(FuncFormatter(_seconds))
    left.set_title("Stall: until parameters may change", loc="left")
    right.set_title("Time to durable, training paused", loc="left")
    handles, labels = left.get_legend_handles_labels()
    figure.legend([*handles[:1], *handles[2:], handles[1]], [*labels[:1], *labels[2:], labels[1]],
                  loc="outside lower center", ncols=3)  # fmt: skip
    return figure, "Stall and time to durable by the share of the rows that changed, their limits, other checkpointers"


def bytes_by_kind(results: Results) -> Drawn:
    rows = list(_rows(results, "bytes by kind"))
    if not rows:
        return None
    shares = list(dict.fromkeys(row["details"]["wanted_share"] for row in rows))
    kinds = list(dict.fromkeys(row["details"]["kind"] for row in rows))
    figure, grid = _figure(2.6 * len(shares) + 1, 5.6, len(shares), 2)
    for index, share in enumerate(shares):
        of_share = [row for row in rows if row["details"]["wanted_share"] == share]
        above, below = grid[index], grid[len(shares) + index]
        for axes, key, per in ((above, "written_in_all_bytes", "intervals"), (below, "stored_bytes", None)):
            for number, (codec, colour) in enumerate(_CODECS.items()):
                details = {r["details"]["kind"]: r["details"] for r in of_share if r["details"]["codec"] == codec}
                heights = [100 * d[key] / (d[per] if per else 1) / d["full_bytes"] for d in details.values()]
                places = [place + 0.2 * (number - 1.5) for place in range(len(heights))]
                axes.bar(places, heights, 0.19, color=colour, label=codec)
            axes.set_yscale("log" if axes is above else "linear")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))
            axes.grid(visible=False, axis="x")
            axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
            axes.axhline(100, color="black", linewidth=0.8, linestyle=":")
        above.set_title(f"{share:.1%} changed", loc="left")
        above.tick_params(labelbottom=False)
        above.set_ylim(0.05, 200)
        above.yaxis.set_minor_formatter(NullFormatter())
    grid[0].set_ylabel("written per interval\n(log scale)")
    grid[len(shares)].set_ylabel("needed for a resume\n(at most)")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_CODECS))
    intervals = rows[0]["details"]["intervals"]
    return figure, (
        f"Bytes of tables and index as a share of a full fp32 checkpoint (dotted), by kind and codec, over {intervals} "
        "intervals; rows as popular as fitted to Criteo"
    )


def growth(results: Results) -> Drawn:
    rows = [row for row in _rows(results, "growth with rows") if "table_rows" in row["details"]]
    if not rows:
        return None
    figure, (left, right) = _figure(10, 3.8, 2)
    for key, label, colour, dashed in (
        ("stall_seconds", "stall of a raw delta", _BLUE, False),
        ("bare_seconds", "limit: bare index_select of its rows", _BLUE, True),
        ("scan_seconds", "of the stall: scanning the marks", _ORANGE, False),
    ):
        _line(left, rows, "table_rows", key, label, colour, dashed=dashed, scale=1e3)
    _line(right, rows, "table_rows", "durable_seconds", "time to durable", _GREEN, scale=1e3)
    changed = f"about {float(format(rows[0]['details']['rows'], '.2g')):,.0f}"
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("rows of the model (log scale)")
        axes.set_ylabel("milliseconds")
        axes.set_ylim(0)
        axes.set_xticks([row["details"]["table_rows"] for row in rows])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1e6:.3g}M"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    left.legend(loc="best")
    left.set_title(f"Stall, {changed} rows changed", loc="left")
    right.set_title("Time to durable, training paused", loc="left")
    return figure, f"Stall and time to durable by the size of the model, {changed} rows changed in each"


_FIGURES: Mapping[str, Callable[[Results], Drawn]] = {
    "stall.svg": stall_by_share,
    "bytes.svg": bytes_by_kind,
    "growth.svg": growth,
}


def _rows(results: Results, measure: str) -> Iterator[ResultRow]:
    """Of the first result that has any: figures of several machines do not belong into one line."""
    for result in results.values():
        found = [row for row in result["rows"] if row["measure"] == measure]
        if found:
            yield from found
            return


def _figure(width: float, height: float, columns: int, rows: int = 1) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharey="row" if rows > 1 else False).flat)


def _line(
    axes: Axes, rows: Sequence[ResultRow], x: str, y: str, label: str, colour: str, *, dashed: bool = False,
    scale: float = 1.0,
) -> None:  # fmt: skip
    points = [(row["details"][x], scale * row["details"][y]) for row in rows]
    axes.plot(*zip(*points, strict=True), "--" if dashed else "-", color=colour, marker="o", markersize=4, label=label)


def _log(axes: Axes, x_label: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _seconds(value: float, _: int) -> str:
    return f"{value:g} s" if value >= 1 else f"{1e3 * value:g} ms"
