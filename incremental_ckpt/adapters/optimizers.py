"""The torch optimizers inside whatever the user passed (KeyedOptimizers, wrappers, lists), their state by name.

It must not know where tables lie in a model, only which parameters' per-row state is saved with the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from incremental_ckpt.adapters.leaf import Leaf, is_per_row, placed
from incremental_ckpt.adapters.memory import why_unwritable
from incremental_ckpt.adapters.walk import class_names, join
from incremental_ckpt.errors import SaveError
from incremental_ckpt.model import Difference

# Wrappers without state of their own, or with state under parameters of their own. Others may keep more and are leaves.
_WRAPPERS = frozenset({"KeyedOptimizerWrapper", "OptimizerWrapper", "LightningOptimizer", "AcceleratedOptimizer"})
_BY_PLACE = " (those of a list are known by their place: give them in the same order, or in a mapping)"


@dataclass(frozen=True)
class RestoredTable:
    """A table whose rows come back by themselves, whichever optimizer had them.

    Attributes:
        fields: the names of its per-row optimizer state.
        iterations: how often it was updated.
    """

    fields: frozenset[str]
    iterations: int = 0


Restored = Mapping[str, RestoredTable]
"""By the name of the parameter that the table is, where it is one."""

NOTHING_RESTORED: Restored = MappingProxyType({})

RowsOf = Callable[[torch.Tensor], int | None]
"""The number of rows of the table that a parameter holds, or None for dense parameters."""


@dataclass
class Extra:
    """State that a wrapper keeps under a parameter of its own (TorchRec's warmup)."""

    name: str
    parameter: torch.Tensor
    state: MutableMapping[Any, Any]


class Optimizers:
    """All optimizers of a training run, and their state by parameter name.

    Args:
        given: a torch optimizer, a TorchRec KeyedOptimizer, a list or a mapping of them, or None.
        names: parameters' names in the model, by id; to be set anew where the model may have new parameters.
        in_backward: optimizers that the model's parameters carry, with the parameters' names.
    """

    def __init__(self, given: object, names: dict[int, str], in_backward: Sequence[tuple[str, Any]] = ()) -> None:
        self.leaves: list[Leaf] = []
        self._extras: list[Extra] = []
        self.names = names
        for name, optimizer in _named(given):
            self._unwrap(name, optimizer, {})
        for name, optimizer in in_backward:
            self._add(Leaf(f"in_backward.{name}", optimizer, in_backward=True))

    def holding(self, parameter: torch.Tensor) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.holds(parameter)]

    def members_of(self, names: Mapping[int, str]) -> dict[str, dict[int, str]]:
        """By optimizer, those of ``names`` whose parameters it holds."""
        return {leaf.name: {id(p): names[id(p)] for p, _ in leaf.groups() if id(p) in names} for leaf in self.leaves}

    def state(self, rows_of: RowsOf) -> dict[str, Any]:
        """By optimizer: ``state`` and ``param_groups`` as in torch, with names for parameters; ``rows`` names the
        per-row state of tables, which is not contained. Values alias live memory.
        """
        return {leaf.name: self._leaf_state(leaf, rows_of) for leaf in self.leaves} | {
            extra.name: {"extra": extra.state[extra.parameter]}
            for extra in self._extras
            if extra.parameter in extra.state
        }

    def differences(self, saved: Mapping[str, Any], restored: Restored = NOTHING_RESTORED) -> list[Difference]:
        """How these optimizers differ from ``saved``."""
        known = {leaf.name for leaf in self.leaves} | {extra.name for extra in self._extras}
        found = [
            Difference(f"optimizer {leaf.name!r} is not in the checkpoint{_BY_PLACE}")
            for leaf in self.leaves
            if leaf.name not in saved and not set(self._names_of(leaf).values()) <= restored.keys()
        ]
        found += [
            Difference(f"optimizer {name!r} of the checkpoint was not given")
            for name, value in saved.items()
            if name not in known and not _has_only(value, restored)
        ]
        for leaf in self.leaves:
            if leaf.name in saved:
                found += self._leaf_differences(leaf, saved[leaf.name], restored)
        return found

    def load(self, saved: Mapping[str, Any], restored: Restored = NOTHING_RESTORED) -> None:
        for leaf in self.leaves:
            if leaf.name in saved:
                self._load_leaf(leaf, saved[leaf.name], restored)
                continue
            names = self._names_of(leaf)
            for parameter, _ in leaf.groups():
                if (table := restored.get(names[id(parameter)])) is not None:
                    leaf.count_on_from(parameter, table.iterations)
                    leaf.take_over(parameter, saved, names[id(parameter)])
        for extra in self._extras:
            if extra.name in saved:
                extra.state[extra.parameter] = deepcopy(dict(saved[extra.name]["extra"]))
            else:
                extra.state.pop(extra.parameter, None)

    def _unwrap(self, name: str, optimizer: Any, keyed: dict[int, str]) -> None:
        parts = getattr(optimizer, "_optims", None)
        if "CombinedOptimizer" in class_names(optimizer) and parts is not None:
            for index, (key, part) in enumerate(parts):
                self._unwrap(join(name, key or str(index)), part, keyed)
            return
        own = getattr(optimizer, "params", None)
        inner = None
        if _WRAPPERS & class_names(optimizer):
            inner = getattr(optimizer, "_optimizer", None) or getattr(optimizer, "optimizer", None)
        if isinstance(own, Mapping):
            if isinstance(inner, torch.optim.Optimizer):
                stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
                for key, parameter in own.items():
                    if id(parameter) not in stepped and isinstance(optimizer.state, MutableMapping):
                        self._extras.append(Extra(f"{name}:{key}", parameter, optimizer.state))
            keyed = keyed | {id(p): key for key, p in own.items()}
        if isinstance(inner, torch.optim.Optimizer):
            self._unwrap(name, inner, keyed)
        elif not is_fused(optimizer):
            self._add(Leaf(name, optimizer, keyed))

    def _add(self, leaf: Leaf) -> None:
        if any(leaf.optimizer is known.optimizer for known in self.leaves):
            return
        if any(leaf.name == known.name for known in self.leaves):
            leaf.name = f"{leaf.name}#{len(self.leaves)}"
        if not hasattr(leaf.optimizer, "param_groups"):
            raise TypeError(
                f"optimizer {leaf.name!r} is a {type(leaf.optimizer).__name__}, not a torch optimizer: what else has "
                "a state belongs into state={...}"
            )
        # KeyedOptimizer's constructor does not do what makes step() run the step hooks.
        leaf.optimizer._patch_step_function()
        self.leaves.append(leaf)

    def _names_of(self, leaf: Leaf) -> dict[int, str]:
        names = {}
        for g, group in enumerate(leaf.optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                key = id(parameter)
                names[key] = self.names.get(key) or leaf.names.get(key) or f"param_groups[{g}].params[{p}]"
        return names

    def _leaf_state(self, leaf: Leaf, rows_of: RowsOf) -> dict[str, Any]:
        names = self._names_of(leaf)
        states: dict[str, Any] = {}
        rows: dict[str, list[str]] = {}
        others: dict[str, Any] = {}
        for parameter, value in leaf.optimizer.state.items():
            name = names.get(id(parameter))
            if name is None:
                if isinstance(parameter, str):
                    others[parameter] = value
                continue
            height = rows_of(parameter)
            per_row = [] if height is None else sorted(k for k, v in value.items() if is_per_row(k, v, height))
            states[name] = {k: v for k, v in value.items() if k not in per_row}
            for key, tensor in states[name].items():
                if isinstance(tensor, torch.Tensor) and (why := why_unwritable(tensor)) is not None:
                    raise SaveError(f"{key!r} of {name!r} in optimizer {leaf.name!r} {why}, and cannot be saved")
            if per_row:
                rows[name] = per_row
        groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in leaf.optimizer.param_groups]
        return {"class": leaf.kind, "state": states, "param_groups": groups, "rows": rows, "others": others}

    def _leaf_differences(self, leaf: Leaf, saved: Mapping[str, Any], restored: Restored) -> list[Difference]:
        names, what = self._names_of(leaf), f"optimizer {leaf.name!r}"
        groups, live = saved["param_groups"], leaf.optimizer.param_groups
        others: list[str] = []
        if saved.get("class", leaf.kind) != leaf.kind:
            text = f"{what} is {leaf.kind}, in the checkpoint {saved['class']}"
            if _options_of(groups) != _options_of(live):
                return [Difference(f"{text}{_BY_PLACE}", fatal=True)]
            others.append(f"{text}, which has the same options and may take other steps{_BY_PLACE}")
        if len(groups) != len(live):
            text = f"{what} has {len(live)} parameter groups, {len(groups)} in the checkpoint: make the same at first"
            return [Difference(text, fatal=True)]
        found = others
        for index, (old, new) in enumerate(zip(groups, live, strict=True)):
            here, there = {names[id(p)] for p in new["params"]}, set(old["params"])
            # Tables may move between these optimizers and fused ones, or between groups.
            here, there = (names - (set(restored) - others) for names, others in ((here, there), (there, here)))
            found += [f"{what}, group {index}: {n!r} is in the checkpoint only" for n in sorted(there - here)]
            found += [f"{what}, group {index}: {n!r} is not in the checkpoint" for n in sorted(here - there)]
        shapes = []
        for parameter, _ in leaf.groups():
            name = names[id(parameter)]
            current = leaf.optimizer.state.get(parameter) or {}
            if name not in restored:
                missing = [k for k in saved["rows"].get(name, ()) if k not in current]
                found += [f"{what}: {name}.{k} was not restored with its rows" for k in missing]
            for key, value in saved["state"].get(name, {}).items():
                if name in restored and key in restored[name].fields:
                    continue
                mine = current.get(key)
                if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor) and mine.shape != value.shape:
                    here_shape, there_shape = tuple(mine.shape), tuple(value.shape)
                    shapes.append(f"{what}: {name}.{key} is {here_shape}, in the checkpoint {there_shape}")
        return [*map(Difference, found), *(Difference(text, fatal=True) for text in shapes)]

    def _load_leaf(self, leaf: Leaf, saved: Mapping[str, Any], restored: Restored) -> None:
        names, states = self._names_of(leaf), leaf.optimizer.state
        known = {name for group in saved["param_groups"] for name in group["params"]}
        for old, group in zip(saved["param_groups"], leaf.optimizer.param_groups, strict=True):
            for key, value in old.items():
                if key != "params":
                    group[key] = placed(value, group.get(key), None)
        for parameter, group in leaf.groups():
            name = names[id(parameter)]
            if name not in known and name in restored:
                leaf.count_on_from(parameter, restored[name].iterations)
                continue
            if name not in saved["state"]:
                leaf.begin_anew(parameter)
                continue
            current, rows = states.get(parameter) or {}, saved["rows"].get(name, ())
            apart: Collection[str] = ()
            if name in restored:
                apart = restored[name].fields
                rows = [key for key in apart if key in current]
            if any(key not in current for key in rows):
                leaf.begin_anew(parameter)  # not strict, and its rows did not come
                continue
            fresh = {key: current[key] for key in rows}
            for key, value in saved["state"][name].items():
                if key in apart:
                    continue  # of a rank that held no rows of the table
                on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
                fresh[key] = placed(value, current.get(key), None if on_host else parameter.device)
            states[parameter] = fresh
        for key, value in saved["others"].items():
            states[key] = placed(value, states.get(key), None)


def _options_of(groups: Sequence[Mapping[str, Any]]) -> list[set[str]]:
    """The names of what each group of parameters is trained with: alike for optimizers that keep the same state."""
    return [{*group} - {"params"} for group in groups]


def steps_of(parameter: str, saved: Mapping[str, Any]) -> int:
    """How many steps some optimizer has taken with a parameter, by its saved state."""
    states = [leaf["state"].get(parameter, {}) for leaf in saved.values() if "state" in leaf]
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def _has_only(saved: Mapping[str, Any], tables: Collection[str]) -> bool:
    """Whether an optimizer has updated some of these tables and nothing else."""
    names = {name for group in saved.get("param_groups", ()) for name in group["params"]}
    return bool(names) and names <= set(tables)


def is_fused(optimizer: object) -> bool:
    """Whether an optimizer's update happens inside a TBE's backward, so that its state is the TBE's."""
    return bool({"FusedOptimizer", "EmptyFusedOptimizer"} & class_names(optimizer))


def is_row_local(optimizer: object, group: Mapping[str, Any]) -> bool:
    """Whether a step with a sparse gradient changes only the gradient's rows, of the weight and of the state."""
    if type(optimizer) is torch.optim.SparseAdam:
        return True
    if type(optimizer) is torch.optim.Adagrad:
        return not group.get("weight_decay")
    return type(optimizer) is torch.optim.SGD and not group.get("momentum") and not group.get("weight_decay")


def _named(given: object) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return [(str(key), optimizer) for key, optimizer in given.items()]
    if isinstance(given, list | tuple):
        return [(str(index), optimizer) for index, optimizer in enumerate(given)]
    return [("0", given)]
