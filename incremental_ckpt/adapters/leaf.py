"""One torch optimizer that holds state itself: what it keeps for the rows of a table, and what besides.

It must not know other optimizers, wrappers or models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from incremental_ckpt.adapters.memory import can_hold, why_unwritable, write
from incremental_ckpt.adapters.row_state import SavedRows, kept_by
from incremental_ckpt.adapters.walk import class_names
from incremental_ckpt.errors import MismatchError
from incremental_ckpt.model import Field


@dataclass
class Leaf:
    """One torch optimizer that holds state itself.

    Attributes:
        name: what the user called it: a mapping's key, a list's place.
        optimizer: the innermost optimizer; its ``step`` runs the step hooks.
        names: of its parameters, by id, where a KeyedOptimizer has given them one.
        in_backward: it steps while backward runs.
    """

    name: str
    optimizer: Any
    names: dict[int, str] = field(default_factory=dict)
    in_backward: bool = False

    def groups(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, group

    def holds(self, parameter: torch.Tensor) -> bool:
        return any(p is parameter for p, _ in self.groups())

    def row_fields(self, parameter: torch.Tensor, rows: int) -> dict[str, torch.Tensor]:
        """The state of a table's parameter that has an entry per row, as live views ``[rows, width]``, by name."""
        state = self.optimizer.state.get(parameter) or {}
        return {k: rows_view(state[k]) for k in sorted(k for k, v in state.items() if is_per_row(k, v, rows))}

    def row_tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """The tensors behind ``row_fields``."""
        state = self.optimizer.state.get(parameter) or {}
        return [v for k, v in sorted(state.items()) if is_per_row(k, v, parameter.shape[0])]

    def kept_fields(self, parameter: torch.Tensor, saved: SavedRows, cols: int) -> tuple[Field, ...] | None:
        """What this optimizer has for each row of a table once the rows of a checkpoint are restored, strictly; None
        where nobody knows.

        Args:
            cols: of the whole table; fields of its width are so given.
        """
        width = parameter.shape[1]
        live = tuple(
            Field(name, str(t.dtype).removeprefix("torch."), cols if t.shape[1] == width else t.shape[1])
            for name, t in self.row_fields(parameter, parameter.shape[0]).items()
        )
        if self.creates_state_at_once:
            return live
        if saved.optimizers.get(self.name) == self.kind:
            return saved.fields  # with its groups, on which it depends what is kept
        kept = next((kept_by(self.kind, group) for p, group in self.groups() if p is parameter), None)
        if kept is None:
            return saved.fields if saved.kind == self.kind else live or None
        if not saved.fields and saved.kept == kept:
            return ()  # it had not taken a step
        return tuple(Field(name, str(parameter.dtype).removeprefix("torch."), cols) for name in kept)

    def create_row_fields(self, parameter: torch.Tensor, wanted: Sequence[Field]) -> None:
        """Create lazily created per-row state as zeros, so that rows can be restored into it; drop the unwanted."""
        rows = parameter.shape[0]
        state = self.optimizer.state.get(parameter)
        live = self.row_fields(parameter, rows)
        names = {f.name for f in wanted}
        if not self.creates_state_at_once:
            for name in live.keys() - names:
                del state[name]
        missing = [f for f in wanted if f.name not in live]
        if missing and state is None:
            state = self.optimizer.state[parameter] = {}
        for each in missing:
            shape = parameter.shape if each.width == parameter[:1].numel() or not rows else (rows, each.width)
            state[each.name] = torch.zeros(shape, dtype=getattr(torch, each.dtype), device=parameter.device)

    def begin_anew(self, parameter: torch.Tensor) -> None:
        """Nothing has been restored of a parameter's state."""
        if not self.creates_state_at_once:
            self.optimizer.state.pop(parameter, None)

    def count_on_from(self, parameter: torch.Tensor, step: int) -> None:
        """A table that another optimizer has updated so often is this one's now; its row fields are restored."""
        state = self.optimizer.state.get(parameter)
        if not state or isinstance(self.optimizer, torch.optim.SGD):
            return
        as_number = type(self.optimizer) is torch.optim.SparseAdam
        state["step"] = step if as_number else torch.tensor(float(step), dtype=torch.float32)

    def take_over(self, parameter: torch.Tensor, saved: Mapping[str, Any], name: str) -> None:
        """The rest of a table's state, which was saved under another optimizer's name."""
        state = self.optimizer.state.get(parameter)
        others = (leaf["state"].get(name, {}) for leaf in saved.values() if leaf.get("class") == self.kind)
        for key, value in next(filter(None, others), {}).items() if state else ():
            state[key] = placed(value, state.get(key), None if key == "step" else parameter.device)

    @property
    def kind(self) -> str:
        return type(self.optimizer).__name__

    @property
    def keeps_no_state(self) -> bool:
        return type(self.optimizer) is torch.optim.SGD and not any(
            g.get("momentum") for g in self.optimizer.param_groups
        )

    @property
    def creates_state_at_once(self) -> bool:
        return any("Adagrad" in name for name in class_names(self.optimizer))


def is_per_row(key: str, value: object, rows: int) -> bool:
    if key == "step" or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return value.dim() > 0 and value.shape[0] == rows


def rows_view(state: torch.Tensor) -> torch.Tensor:
    flat = state.data
    if flat.dim() == 2:
        return flat
    try:
        return flat.view(flat.shape[0], math.prod(flat.shape[1:]))
    except RuntimeError as cause:
        raise MismatchError(f"optimizer state of shape {tuple(state.shape)} is not laid out row by row") from cause


def placed(value: Any, current: Any, device: torch.device | None) -> Any:
    """A saved value in the place of the current one: written into the tensor that is there if it fits, else a copy."""
    if isinstance(value, torch.Tensor):
        if (
            isinstance(current, torch.Tensor)
            and (current.shape, current.dtype) == (value.shape, value.dtype)
            and why_unwritable(current) is None
            and can_hold(current, value)
        ):
            write(current, value)
            return current
        return value.detach().to(device=device or value.device, copy=True)
    if isinstance(value, dict):
        inner = current if isinstance(current, dict) else {}
        return {k: placed(v, inner.get(k), device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        found = [placed(v, None, device) for v in value]
        return found if isinstance(value, list) else tuple(found)
    return deepcopy(value)
