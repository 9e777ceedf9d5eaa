"""Tables that are parameters (nn.Embedding, nn.EmbeddingBag, data-parallel tables) and are updated by torch optimizers.

It must not know fused tables or checkpoints: rows are marked before the optimizer's step, where gradients are final.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from incremental_ckpt.adapters.leaf import Leaf
from incremental_ckpt.adapters.memory import is_shared_within, why_unwritable
from incremental_ckpt.adapters.optimizers import Optimizers, is_row_local
from incremental_ckpt.adapters.row_state import SavedRows, differing
from incremental_ckpt.errors import CheckpointError
from incremental_ckpt.model import WEIGHT, Difference, Field, Mark, Shard, Table

_ANNOUNCED_AT_ONCE = 1 << 16
_DENSE = (
    "the gradients of nn.Embedding are dense, so that any row may have changed: sparse=True in it, under SparseAdam, "
    "Adagrad, or SGD without momentum, lets only those rows be saved that did"
)

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Cut:
    """A shard of a table that is some rows of a parameter.

    Attributes:
        table_rows, table_cols: shape of the whole table.
        row_start, col_start: where the shard lies in it.
        begin, rows: which rows of the parameter it is.
    """

    table_rows: int
    table_cols: int
    row_start: int
    col_start: int
    begin: int
    rows: int


@dataclass(frozen=True)
class TableParameter:
    """One table, or one shard of it, that is a parameter.

    Attributes:
        table: its name.
        owner: the module that has it, first of all modules that share it.
        key: its name there.
        users: every module that shares it.
        may_track: False where rows change in ways that no sparse gradient tells.
        replicated: all ranks hold it, alike.
        cut: which part of the table it is; None: all of it.
        only_dense: nothing but its dense gradients is in the way of tracking it.
    """

    table: str
    owner: nn.Module
    key: str
    users: tuple[nn.Module, ...]
    may_track: bool
    replicated: bool = False
    cut: Cut | None = None
    only_dense: bool = False

    @property
    def parameter(self) -> torch.Tensor:
        found = self.owner._parameters.get(self.key)
        if found is None:
            raise CheckpointError(
                f"table {self.table!r} has no parameter {self.key!r} any more (removed, or replaced by a "
                "parametrization or pruning): make such changes before the Checkpointer; after them, close this one "
                "and make a new one"
            )
        return found

    @property
    def table_cols(self) -> int:
        return self.parameter.shape[1] if self.cut is None else self.cut.table_cols


def gathers_rows(module: nn.Module) -> bool:
    """Whether a module's weight is a table; one without columns, or not of rows at all, is dense state."""
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.shape[1] > 0


def table_parameters(found: Sequence[tuple[str, nn.Module]], holders: Mapping[int, set[int]]) -> list[TableParameter]:
    """One table for each distinct weight of the embedding modules.

    Args:
        found: embedding modules by name, in the order of the model.
        holders: ids of the modules that hold a parameter, by the parameter's id; others than embeddings among them mean
            that it is tied to something whose gradient is dense.
    """
    by_weight: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in found:
        weight = module._parameters["weight"]
        assert weight is not None
        _check_memory(name, weight)
        by_weight.setdefault(id(weight), []).append((name, module))
    tables = []
    for key, users in by_weight.items():
        name, owner = users[0]
        modules = {id(m): m for _, m in users}
        weight = owner._parameters["weight"]
        assert weight is not None
        # Streams read rows as bytes that lie together.
        could_track = all(m.max_norm is None for m in modules.values()) and weight.stride(1) == 1
        could_track = could_track and (holders[key] == modules.keys() or not weight.requires_grad)
        may_track = could_track and (all(m.sparse for m in modules.values()) or not weight.requires_grad)
        only_dense = could_track and not may_track
        users_of = tuple(modules.values())
        tables.append(TableParameter(name or WEIGHT, owner, "weight", users_of, may_track, only_dense=only_dense))
    return tables


def _check_memory(table: str, weight: torch.Tensor) -> None:
    """Raises CheckpointError where rows cannot be read and written one by one."""
    if (why := why_unwritable(weight)) is not None:
        raise CheckpointError(f"table {table!r} {why}, and cannot be saved")
    if is_shared_within(weight):
        raise CheckpointError(
            f"table {table!r} has elements that share memory (expand, as_strided), so that no row can be saved by "
            "itself: give it a weight of its own (.clone()) before the Checkpointer is made"
        )


class ParameterTables:
    """Tables whose rows torch optimizers update.

    Args:
        members: the tables.
        optimizers: all that were given; what they do to a table decides whether it is tracked.
    """

    in_backward = False

    def __init__(self, members: Sequence[TableParameter], optimizers: Optimizers) -> None:
        self._members = tuple(members)
        self._optimizers = optimizers
        self._holders = [_holders_of(m, optimizers) for m in members]
        self._tracked = [self._is_tracked(i) for i in range(len(members))]
        self._shapes = [m.parameter.shape for m in members]
        self._tables: list[Table | None] = [None] * len(members)
        self._live: list[tuple[object, ...]] = [()] * len(members)
        self._stamps: list[Stamp] | None = None
        self._updating = [False] * len(members)
        self._gradients: list[torch.Tensor | None] = [None] * len(members)
        self._handles: list[RemovableHandle] = []
        self._mark: Mark | None = None
        self._mark_all: Callable[[int], None] | None = None

    @property
    def owned_modules(self) -> tuple[nn.Module, ...]:
        return ()

    def rows_are_restored(self) -> None:
        """Rows were written past the version counters: whoever else watches the model is to notice."""
        for member in self._members:
            torch.autograd.graph.increment_version(member.parameter)
        if self._stamps is not None:
            self._stamps = [self._stamp(index) for index in range(len(self._members))]

    def tables(self) -> Sequence[Table]:
        self._check_holders()
        return [self._table(index) for index in range(len(self._members))]

    def differences(self, saved: Mapping[str, SavedRows]) -> list[Difference]:
        found = []
        for member, holders in zip(self._members, self._holders, strict=True):
            if (rows := saved.get(member.table)) is not None:
                kept = holders[0].kept_fields(member.parameter, rows, member.table_cols) if holders else ()
                found.append(differing(member.table, rows, kept, holders[0].kind if holders else None))
        return [difference for difference in found if difference is not None]

    def prepare_restore(self, saved: Mapping[str, SavedRows]) -> None:
        for member, holders in zip(self._members, self._holders, strict=True):
            rows = saved.get(member.table)
            if rows is None or not holders:
                continue
            kept = holders[0].kept_fields(member.parameter, rows, member.table_cols)
            if not rows.suits(kept, holders[0].kind):
                continue  # not strict: what is there stays, and what is not begins anew
            cols = member.parameter.shape[1]
            wanted = [replace(f, width=cols) if f.width == member.table_cols else f for f in rows.fields]
            holders[0].create_row_fields(member.parameter, wanted)

    def watch(self, mark: Mark, mark_all: Callable[[int], None]) -> None:
        self._mark, self._mark_all = mark, mark_all
        self._stamps = [self._stamp(index) for index in range(len(self._members))]
        leaves: dict[int, tuple[Leaf, list[int]]] = {}
        for index, holders in enumerate(self._holders):
            for leaf in holders:
                leaves.setdefault(id(leaf), (leaf, []))[1].append(index)
        for leaf, members in leaves.values():
            step = partial(self._before_step, members)
            self._handles.append(leaf.optimizer.register_step_pre_hook(step))
            after = leaf.optimizer.register_step_post_hook(partial(self._after_step, members))
            # Before all others: what they change is no update, and has to be noticed as an edit.
            leaf.optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
            self._handles.append(after)

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._mark, self._mark_all, self._stamps = [], None, None, None

    def _check_holders(self) -> None:
        """Raises CheckpointError where an optimizer has taken over a table, whose state for its rows would be saved by
        nobody."""
        held: dict[int, set[int]] = {}
        for leaf in self._optimizers.leaves:
            if not leaf.keeps_no_state:
                for parameter, _ in leaf.groups():
                    held.setdefault(id(parameter), set()).add(id(leaf))
        for member, holders in zip(self._members, self._holders, strict=True):
            if held.get(id(member.parameter), set()) - {id(leaf) for leaf in holders}:
                raise CheckpointError(
                    f"table {member.table!r} has other optimizers than when the Checkpointer was made: close it, and "
                    "make a new one after the last change of parameter groups"
                )

    def _is_tracked(self, index: int) -> bool:
        member, holders = self._members[index], self._holders[index]
        if not member.may_track:
            return False
        if not member.parameter.requires_grad:
            return True
        groups = [(leaf, g) for leaf in holders for p, g in leaf.groups() if p is member.parameter]
        return bool(groups) and all(is_row_local(leaf.optimizer, group) for leaf, group in groups)

    def _table(self, index: int) -> Table:
        member = self._members[index]
        weight = member.parameter
        self._check_shape(index)
        self._look_for_edits(index)
        rows = weight.shape[0]
        state: dict[str, torch.Tensor] = {}
        for leaf in self._holders[index]:
            state |= {k: t for k, t in leaf.row_fields(weight, rows).items() if k not in state}
        if WEIGHT in state:
            raise CheckpointError(
                f"an optimizer keeps a state named {WEIGHT!r} for the rows of {member.table!r}, which is the name of "
                "the rows themselves: give it another name"
            )
        live = (weight.data_ptr(), id(weight), *(t.data_ptr() for t in state.values()), *state)
        known = self._tables[index]
        if known is None or live != self._live[index]:
            _check_memory(member.table, weight)
            edited = partial(self._edited, index)
            known = self._tables[index] = _table(member, weight, state, self._tracked[index], edited)
            self._live[index] = live
        return known

    def _before_step(self, members: Sequence[int], optimizer: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        assert self._mark is not None
        assert self._mark_all is not None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        for index in members:
            if not self._tracked[index] or id(self._members[index].parameter) not in groups:
                continue
            self._check_shape(index)
            self._look_for_edits(index)
            self._updating[index] = True
            parameter = self._members[index].parameter
            gradient = self._gradients[index] = parameter.grad
            if closure is not None and parameter.requires_grad:
                self._announce_all(index)  # the gradient comes into being inside the step
                self._gradients[index] = None
            elif gradient is not None and gradient.is_sparse and is_row_local(optimizer, groups[id(parameter)]):
                self._mark(index, gradient._indices()[0])
            elif gradient is not None:
                self._mark_all(index)

    def _after_step(self, members: Sequence[int], _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._stamps is not None:
            for index in members:
                self._stamps[index] = self._stamp(index)
                self._updating[index] = False
                gradient, marked = self._members[index].parameter.grad, self._gradients[index]
                self._gradients[index] = None
                if marked is not None and gradient is not None and gradient is not marked and self._mark_all:
                    self._mark_all(index)  # another hook has exchanged it after the rows of the old one were marked

    def _check_shape(self, index: int) -> None:
        """Raises CheckpointError where rows were added or removed, for which there are no marks."""
        member, shape = self._members[index], self._shapes[index]
        if member.parameter.shape != shape:
            now, then = (" x ".join(map(str, s)) for s in (member.parameter.shape, shape))
            raise CheckpointError(
                f"table {member.table!r} is {now} now and was {then} when the Checkpointer was made. A resume begins "
                "with the model as it is built: resize tables before the Checkpointer is made; after it, close this "
                "one and make a new one"
            )

    def _announce_all(self, index: int) -> None:
        """Any row may be about to change. Unlike mark_all this comes before it, so that a stream keeps old values."""
        assert self._mark is not None
        parameter = self._members[index].parameter
        for begin in range(0, parameter.shape[0], _ANNOUNCED_AT_ONCE):
            end = min(begin + _ANNOUNCED_AT_ONCE, parameter.shape[0])
            self._mark(index, torch.arange(begin, end, device=parameter.device))

    def _stamp(self, index: int) -> Stamp:
        """What an edit of a row, or of its optimizer state, changes: which tensors there are, where they lie, and how
        often each was written to. A ``load_state_dict`` changes it too: no hook in the module is needed for that, which
        would be saved and copied with the model. What takes the place of a tensor never lies where that did: the table
        that was handed out last keeps its memory."""
        parameter = self._members[index].parameter
        tensors = [parameter, *(t for leaf in self._holders[index] for t in leaf.row_tensors(parameter))]
        return tuple((id(t), t.data_ptr(), t._version) for t in tensors)

    def _edited(self, index: int) -> bool:
        """See Table.edited. It looks twice: an update that begins or ends meanwhile is none."""
        for _ in range(2):
            stamps = self._stamps
            if stamps is None or self._updating[index] or self._stamp(index) == stamps[index]:
                return False
        return not self._updating[index]

    def _look_for_edits(self, index: int) -> None:
        if self._stamps is None or self._mark_all is None or not self._tracked[index]:
            return
        if (stamp := self._stamp(index)) != self._stamps[index]:
            self._mark_all(index)
            self._stamps[index] = stamp


def _holders_of(member: TableParameter, optimizers: Optimizers) -> list[Leaf]:
    """The optimizers that hold a table, first the one that keeps state for its rows."""
    holders = sorted(optimizers.holding(member.parameter), key=lambda leaf: leaf.keeps_no_state)
    if sum(not leaf.keeps_no_state for leaf in holders) > 1:
        names = " and ".join(repr(leaf.name) for leaf in holders if not leaf.keeps_no_state)
        raise CheckpointError(
            f"the optimizers {names} all keep state for the rows of {member.table!r}, and only one state per row can "
            "be saved: give the table to one of them"
        )
    return holders


def _table(
    member: TableParameter,
    weight: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    tracked: bool,
    edited: Callable[[], bool],
) -> Table:
    # `.data` has a version counter of its own: what is written through this view is no edit of the user's.
    views = {WEIGHT: weight.detach().data, **state}
    fields = tuple(Field(k, str(t.dtype).removeprefix("torch."), t.shape[1]) for k, t in views.items())
    rows, cols = weight.shape
    shard = Shard(member.table, rows, cols, 0, rows, 0, cols, fields)
    if (cut := member.cut) is not None:
        views = {k: t[cut.begin : cut.begin + cut.rows] for k, t in views.items()}
        shard = Shard(
            member.table, cut.table_rows, cut.table_cols, cut.row_start, cut.rows, cut.col_start, cols, fields
        )
    return Table(shard, views, tracked, member.replicated, edited, _DENSE if member.only_dense else "")
