"""What optimizers keep for each row of a table, and whether that is what a checkpoint has for it.

It must not know where tables or their state lie.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from incremental_ckpt.model import WEIGHT, Difference, Field

# Optimizers that create their state in the first step: what they will keep, each as wide as the table.
_KEPT = {"SparseAdam": ("exp_avg", "exp_avg_sq"), "Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq")}

# What these keep under one name means one thing, whichever of them keeps it.
_INTERCHANGEABLE = frozenset({*_KEPT, "Adagrad", "RowWiseAdagrad", "SGD"})


@dataclass(frozen=True)
class SavedRows:
    """What a checkpoint has for each row of a table beside the weight.

    Attributes:
        fields: as wide as those of the whole table.
        kind: of the optimizer that kept them, by its class; None: no optimizer is known to have had the table.
        kept: what it keeps once it has stepped, where that is known.
        optimizers: the kinds of the optimizers that may have had it, by the names they were given.
    """

    fields: tuple[Field, ...]
    kind: str | None = None
    kept: tuple[str, ...] | None = None
    optimizers: Mapping[str, str] = field(default_factory=dict)

    def suits(self, kept: Collection[Field] | None, kind: str | None) -> bool:
        """Whether they are what an optimizer of some kind keeps; ``kept`` as for ``differing``."""
        alike = not self.fields or self.kind in (None, kind) or self.is_fused or self.kind in _INTERCHANGEABLE
        return kept is not None and alike and set(kept) == set(self.fields)

    @property
    def is_fused(self) -> bool:
        return self.kind is not None and self.kind.startswith("fused")


def saved_rows(fields: Mapping[str, Sequence[Field]], state: Mapping[str, Any]) -> dict[str, SavedRows]:
    """By table, from the fields of a checkpoint's tables and the state beside them."""
    leaves = {name: leaf for name, leaf in state["optimizer"].items() if "param_groups" in leaf}
    kinds = {name: leaf.get("class", "torch optimizer") for name, leaf in leaves.items()}
    groups = {name: {p: g for g in leaf["param_groups"] for p in g["params"]} for name, leaf in leaves.items()}
    fused = {
        shard[0]: f"fused {entry['counters']['optimizer']}" if "optimizer" in entry["counters"] else "fused"
        for entry in state["fused"]
        for shard in entry["shards"]
    }
    found = {}
    for table, whole in fields.items():
        rows = tuple(f for f in whole if f.name != WEIGHT)
        parameter = parameter_of(table)
        holders = [name for name in leaves if parameter in groups[name]]
        holders.sort(key=lambda name: parameter not in leaves[name].get("rows", {}))
        if table in fused:
            found[table] = SavedRows(rows, fused[table])
        elif holders:
            kind = kinds[holders[0]]
            kept = kept_by(kind, groups[holders[0]][parameter])
            found[table] = SavedRows(rows, kind, kept, {name: kinds[name] for name in holders})
        else:  # perhaps another rank's
            found[table] = SavedRows(rows, optimizers=kinds)
    return found


def kept_by(kind: str, group: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The fields that an optimizer will keep, each as wide as the table; None: unknown, or there already."""
    if kind == "SGD":
        return ("momentum_buffer",) if group.get("momentum") else ()
    names = _KEPT.get(kind)
    return (*names, "max_exp_avg_sq") if names is not None and group.get("amsgrad") else names


def differing(table: str, saved: SavedRows, kept: Collection[Field] | None, kind: str | None) -> Difference | None:
    """
    Args:
        kept: what the model will have for each row, as wide as those of the whole table; None: nobody knows.
        kind: of its optimizer; None: it has none.
    """
    if saved.suits(kept, kind):
        return None
    theirs, mine = {f.name: f for f in saved.fields}, {f.name: f for f in kept or ()}
    by = f"{saved.kind} kept" if saved.kind is not None else "the checkpoint has"
    keeps = f"{kind} of the model keeps" if kind is not None else "no optimizer of the model has it, which keeps"
    what = _listed(kept) if kept is not None else "what is not known before its first step"
    text = (
        f"table {table}: {by} {_listed(saved.fields)} for each row, and {keeps} {what}. Give it the optimizer that it "
        "was saved with"
    )
    return Difference(text, fatal=any(theirs[name] != mine[name] for name in theirs.keys() & mine.keys()))


def parameter_of(table: str) -> str:
    """The name of the parameter that a table is, where it is one."""
    return table if table == WEIGHT else f"{table}.{WEIGHT}"


def _listed(fields: Collection[Field]) -> str:
    return ", ".join(f"{f.name} ({f.dtype}[{f.width}])" for f in sorted(fields, key=lambda f: f.name)) or "nothing"
