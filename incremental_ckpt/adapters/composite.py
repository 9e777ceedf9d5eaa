"""The adapter of any model: tables of all kinds found in it, the dense state, and the optimizers, behind the one seam.

It must not know tracker, snapshot or store; it hands live tensors up and puts saved ones back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from incremental_ckpt.adapters import torch_nn, torchrec
from incremental_ckpt.adapters.dense import DenseState
from incremental_ckpt.adapters.difference import Difference
from incremental_ckpt.adapters.fbgemm import FusedTables, Place, is_tbe, refuse_unreachable
from incremental_ckpt.adapters.optimizers import Optimizers, RestoredTable, is_fused, parameter_of, steps_of
from incremental_ckpt.adapters.walk import join, parameter_names, parameters, synchronised, walk
from incremental_ckpt.errors import CheckpointError, MismatchError, SaveError
from incremental_ckpt.model import WEIGHT, Field, Mark, Table

log = logging.getLogger("incremental_ckpt")

_NAMED = 5


class TableSource(Protocol):
    """Tables that are updated in one way; they are numbered from 0 within the source."""

    in_backward: bool

    @property
    def owned_modules(self) -> tuple[nn.Module, ...]: ...

    def tables(self) -> Sequence[Table]: ...

    def prepare_restore(self, fields: Mapping[str, Sequence[Field]]) -> None: ...

    def rows_are_restored(self) -> None: ...

    def watch(self, mark: Mark, mark_all: Callable[[int], None]) -> None: ...

    def unwatch(self) -> None: ...


class CompositeAdapter:
    """A ModelAdapter over every table found in a model.

    Args:
        model: any module.
        optimizer: a torch optimizer, a TorchRec KeyedOptimizer, a list or a mapping of them, or None.

    Raises:
        CheckpointError: the model has tables whose rows cannot be reached.
    """

    def __init__(self, model: nn.Module, optimizer: object = None) -> None:
        self._model = model
        self._given = optimizer
        self._handles: list[RemovableHandle] = []
        self._mark: Mark | None = None
        self._mark_all: Callable[[int], None] | None = None
        self._updated_in_backward = False
        self._restored: dict[str, frozenset[str]] = {}
        self._discover()
        self._warn_of_optimizers_that_do_not_fit()

    def tables(self) -> Sequence[Table]:
        """See ModelAdapter. Looks for edits made outside of training, too: call it before the marks are frozen.

        Raises:
            MismatchError: the model was resharded into other shards than it had.
        """
        self._follow_resharding()
        return [table for source in self._sources for table in source.tables()]

    def watch(self, mark: Mark, mark_all: Callable[[int], None]) -> None:
        assert self._mark is None, "watched already"
        self._mark, self._mark_all = mark, mark_all
        self._watch_sources()

    def unwatch(self) -> None:
        for source in self._sources:
            source.unwatch()
        for handle in self._handles:
            handle.remove()
        self._handles, self._mark, self._mark_all, self._updated_in_backward = [], None, None, False

    def state(self) -> Mapping[str, Any]:
        """See ModelAdapter. ``fused`` lists, for each TBE, its shards and what its optimizer counts.

        Raises:
            SaveError: rows were updated in backward and the dense optimizer has not stepped since.
        """
        if self._updated_in_backward and self._has_dense_optimizer():
            raise SaveError(
                "embedding rows were updated in backward and the dense optimizer has not stepped since: rows and dense "
                "weights would be from different steps; save after optimizer.step()"
            )
        return {
            "dense": self._dense.state(),
            "optimizer": self._optimizers.state(self._rows_of()),
            "fused": [
                {"shards": [[*place] for place in self._places(source)], "counters": source.counters()}
                for source in self._fused
            ],
            "replicated": self._replicated,
        }

    def load_state(self, state: Mapping[str, Any], *, strict: bool) -> list[str]:
        """See ModelAdapter; rows must have been prepared and restored before."""
        counters = self._counters_of(state["fused"])
        iterations = _iterations_of(state["fused"])
        restored = {
            name: RestoredTable(fields, iterations.get(table) or steps_of(name, state["optimizer"]))
            for table, fields in self._restored.items()
            for name in (parameter_of(table),)
        }
        steps = [self._steps_before(source, state["optimizer"]) for source in self._fused]
        found = [
            *self._dense.differences(state["dense"]),
            *self._optimizers.differences(state["optimizer"], restored),
        ]
        for source, saved, step in zip(self._fused, counters, steps, strict=True):
            if saved is None and step is None:
                found.append(Difference(f"the checkpoint has no fused optimizer of {source.places[0].table!r}"))
        lines = [d.text for d in found if strict or d.fatal]
        if lines:
            raise MismatchError("model and checkpoint differ:\n  " + "\n  ".join(lines))
        self._dense.load(state["dense"])
        self._optimizers.load(state["optimizer"], restored)
        for source, saved, step in zip(self._fused, counters, steps, strict=True):
            if saved is not None:
                source.load_counters(saved)
            elif step is not None:
                source.load_step(step)
        self._updated_in_backward = False
        for each in self._sources:
            each.rows_are_restored()
        return [] if strict else [d.text for d in found]

    def prepare_restore(self, fields: Mapping[str, Sequence[Field]]) -> Sequence[Table]:
        self._restored = {table: frozenset(f.name for f in found) - {WEIGHT} for table, found in fields.items()}
        for source in self._sources:
            source.prepare_restore(fields)
        return self.tables()

    def _discover(self) -> None:
        names = parameter_names(self._model)
        in_backward = [
            (names[id(p)], optimizer)
            for p in parameters(self._model)
            for optimizer in getattr(p, "_in_backward_optimizers", ())
            if not is_fused(optimizer)
        ]
        self._optimizers = Optimizers(self._given, names, in_backward)
        closed: set[int] = set()
        fused: list[FusedTables] = []
        members: list[torch_nn.TableParameter] = []
        plain: list[tuple[str, nn.Module]] = []
        holders: dict[int, set[int]] = {}
        self._collections: list[nn.Module] = []
        for fqn, module in walk(self._model, closed):
            refuse_unreachable(fqn, module)
            for parameter in module._parameters.values():
                holders.setdefault(id(parameter), set()).add(id(module))
            if torchrec.kernel_lists(module) or torchrec.is_kernel(module):
                found = torchrec.tables_of(fqn, module)
                fused += found.fused
                members += found.parameters
                closed |= {id(m) for m in found.closed} | {id(m) for f in found.fused for m in f.owned_modules}
                self._collections.append(module)
            elif is_tbe(module):
                fused.append(FusedTables(module, _places_of_bare_tbe(fqn, module)))
                closed.add(id(module))
            elif torch_nn.gathers_rows(module):
                plain.append((fqn, module))
        alike = synchronised(self._model)
        members += torch_nn.table_parameters(plain, holders)
        members = [replace(m, replicated=m.replicated or id(m.parameter) in alike) for m in members]
        alike |= {id(m.parameter) for m in members if m.replicated}
        self._replicated = sorted(name for key, name in names.items() if key in alike)
        self._fused = fused
        self._parameters = torch_nn.ParameterTables(members, self._optimizers)
        self._sources: list[TableSource] = [*fused, self._parameters]
        self._members = members
        self._dense = DenseState(self._model, closed, lambda: {id(m.parameter) for m in members})
        below = [m for root in self._model.modules() if id(root) in closed for m in root.modules()]
        self._fused_parameters = {id(p) for m in below for p in m._parameters.values()}
        self._fused_parameters -= {id(m.parameter) for m in members}
        self._structure = self._current_structure()
        shards = [t.shard for s in self._sources for t in s.tables()]
        places = [(s.table, s.row_start, s.col_start) for s in shards]
        if len(set(places)) != len(places):
            twice = sorted({p[0] for p in places if places.count(p) > 1})
            raise CheckpointError(f"several tables of the model have the same name: {', '.join(twice)}")
        self._shards = [(s.table, s.row_start, s.rows, s.col_start, s.cols) for s in shards]

    def _warn_of_optimizers_that_do_not_fit(self) -> None:
        """The run that is resumed would be another one, and nothing else would say so."""
        names = parameter_names(self._model)
        held = {id(p) for leaf in self._optimizers.leaves for p, _ in leaf.groups()} | self._fused_parameters
        without = [names[id(p)] for p in parameters(self._model) if p.requires_grad and id(p) not in held]
        if without:
            log.warning(
                "no optimizer was given for %d trainable parameters of the model (%s%s): if one trains them, its state "
                "is not saved and a resumed run is another one; give every optimizer (optimizer=[...]), also those of "
                "nn.Embedding",
                len(without), ", ".join(without[:_NAMED]), ", ..." if len(without) > _NAMED else "",
            )  # fmt: skip
        for leaf in self._optimizers.leaves:
            if not any(id(p) in names for p, _ in leaf.groups()):
                log.warning("optimizer %r trains no parameter of this model: was it made for another one?", leaf.name)

    def _watch_sources(self) -> None:
        assert self._mark is not None
        assert self._mark_all is not None
        base = 0
        for source in self._sources:
            source.watch(*_numbered_from(base, self._noting_updates(source), self._mark_all))
            base += len(source.tables())
        for leaf in self._optimizers.leaves:
            hook = self._note_update if leaf.in_backward else self._note_dense_step
            self._handles.append(leaf.optimizer.register_step_post_hook(hook))

    def _noting_updates(self, source: TableSource) -> Mark:
        mark = self._mark
        assert mark is not None
        if not source.in_backward:
            return mark

        def noting(table: int, rows: torch.Tensor) -> None:
            self._updated_in_backward = True
            mark(table, rows)

        return noting

    def _note_update(self, *_: object) -> None:
        self._updated_in_backward = True

    def _note_dense_step(self, *_: object) -> None:
        self._updated_in_backward = False

    def _has_dense_optimizer(self) -> bool:
        """Whether a given optimizer trains anything that is not a fused table."""
        return any(
            parameter.requires_grad and id(parameter) not in self._fused_parameters
            for leaf in self._optimizers.leaves
            if not leaf.in_backward
            for parameter, _ in leaf.groups()
        )

    def _follow_resharding(self) -> None:
        if self._current_structure() == self._structure:
            return
        before, watched = self._shards, self._mark is not None
        mark, mark_all = self._mark, self._mark_all
        self.unwatch()
        self._discover()
        if self._shards != before:
            raise MismatchError("the model was resharded into other shards: close this Checkpointer and open a new one")
        if watched:
            self._mark, self._mark_all = mark, mark_all
            self._watch_sources()
            assert mark_all is not None
            for index in range(len(self._shards)):
                mark_all(index)  # nobody watched the new kernels until now

    def _current_structure(self) -> tuple[int, ...]:
        return tuple(id(k) for c in self._collections for k in torchrec.kernel_lists(c))

    def _rows_of(self) -> Callable[[torch.Tensor], int | None]:
        rows = {id(m.parameter): m.parameter.shape[0] for m in self._members}
        return lambda parameter: rows.get(id(parameter))

    @staticmethod
    def _places(source: FusedTables) -> list[tuple[str, int, int]]:
        return [(p.table, p.row_start, p.col_start) for p in source.places]

    def _counters_of(self, saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
        """For each TBE the saved counters of one of its shards, else (after resharding) of any shard of its tables."""
        by_shard = {tuple(shard): entry["counters"] for entry in saved for shard in entry["shards"]}
        by_table = {shard[0]: entry["counters"] for entry in reversed(saved) for shard in entry["shards"]}
        found = []
        for source in self._fused:
            places = self._places(source)
            candidates = [*(by_shard.get(place) for place in places), *(by_table.get(place[0]) for place in places)]
            found.append(next((c for c in candidates if c is not None), None))
        return found

    @staticmethod
    def _steps_before(source: FusedTables, saved: Mapping[str, Any]) -> int | None:
        """How many steps a torch optimizer has taken with the tables of a TBE; None if none had them."""
        names = {parameter_of(place.table) for place in source.places}
        for optimizer in saved.values():
            if names & {n for group in optimizer.get("param_groups", ()) for n in group["params"]}:
                return max(steps_of(name, saved) for name in names)
        return None


def _iterations_of(fused: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How often each fused table was updated, by its name."""
    counted = [(entry["shards"], entry["counters"].get("iter")) for entry in fused]
    return {shard[0]: int(count) for shards, count in counted if count is not None for shard in shards}


def _numbered_from(base: int, mark: Mark, mark_all: Callable[[int], None]) -> tuple[Mark, Callable[[int], None]]:
    return (lambda table, rows: mark(base + table, rows)), (lambda table: mark_all(base + table))


def _places_of_bare_tbe(fqn: str, tbe: Any) -> list[Place]:
    names = tbe.table_names or [f"table_{index}" for index in range(len(tbe.embedding_specs))]
    return [
        Place(join(fqn, name), rows, cols) for name, (rows, cols, *_) in zip(names, tbe.embedding_specs, strict=True)
    ]
