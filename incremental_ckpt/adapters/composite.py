"""The adapter of any model: tables of all kinds found in it, the dense state, and the optimizers, behind the one seam.

It must not know tracker, snapshot or store; it hands live tensors up and puts saved ones back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from incremental_ckpt.adapters.discovery import Shapes, TableSource, discover, structure_of
from incremental_ckpt.adapters.fbgemm import FusedTables
from incremental_ckpt.adapters.optimizers import RestoredTable, steps_of
from incremental_ckpt.adapters.row_state import parameter_of, saved_rows
from incremental_ckpt.adapters.walk import parameter_names, parameters
from incremental_ckpt.errors import MismatchError, SaveError
from incremental_ckpt.model import WEIGHT, Difference, Field, Mark, Table

log = logging.getLogger("incremental_ckpt")

_NAMED = 5


class CompositeAdapter:
    """A ModelAdapter over every table found in a model.

    Args:
        model: any module.
        optimizer: a torch optimizer, a TorchRec KeyedOptimizer, a list or a mapping of them, or None.
        strict: parameters and buffers may not come or go, since a strict resume would refuse them.

    Raises:
        CheckpointError: the model has tables whose rows cannot be reached.
    """

    def __init__(self, model: nn.Module, optimizer: object = None, *, strict: bool = True) -> None:
        self._model = model
        self._strict = strict
        self._given = optimizer
        self._handles: list[RemovableHandle] = []
        self._mark: Mark | None = None
        self._mark_all: Callable[[int], None] | None = None
        self._updated_in_backward = False
        self._fields: Mapping[str, Sequence[Field]] = {}
        self._tables: Sequence[Table] = ()
        self._found = discover(model, optimizer)
        self._absent_as_built = frozenset(self._found.dense.absent())
        self.begin()
        self._warn_of_optimizers_that_do_not_fit()

    def tables(self) -> Sequence[Table]:
        """See ModelAdapter. Looks for edits made outside of training, too: call it before the marks are frozen.

        Raises:
            MismatchError: the model has other tables or shards than it had.
        """
        self._follow_changes()
        self._tables = [table for source in self._found.sources for table in source.tables()]
        return self._tables

    def watch(self, mark: Mark, mark_all: Callable[[int], None]) -> None:
        assert self._mark is None, "watched already"
        self._mark, self._mark_all = mark, mark_all
        self._watch_sources()

    def begin(self) -> None:
        self._forms, self._absent = self._found.dense.forms(), self._found.dense.absent()
        self._dtypes = {table.shard.table: table.shard.dtype for table in self.tables()}
        self._trained = self._found.optimizers.members_of(parameter_names(self._model))

    def unwatch(self) -> None:
        for source in self._found.sources:
            source.unwatch()
        for handle in self._handles:
            handle.remove()
        self._handles, self._mark, self._mark_all, self._updated_in_backward = [], None, None, False

    def state(self) -> Mapping[str, Any]:
        """See ModelAdapter. ``fused`` lists, for each TBE, its shards and what its optimizer counts.

        Raises:
            SaveError: rows were updated in backward and the dense optimizer has not stepped since; or the model has
                other parameters or buffers than when the adapter was made, or they have another shape or dtype; or an
                optimizer goes on with parameters that the model has exchanged.
        """
        if self._updated_in_backward and self._has_dense_optimizer():
            raise SaveError(
                "embedding rows were updated in backward and the dense optimizer has not stepped since: rows and dense "
                "weights would be from different steps; save after optimizer.step()"
            )
        dense = self._found.dense.state()
        self._check_that_a_resume_finds_the_same(dense)
        names = self._found.optimizers.names = parameter_names(self._model)
        if self._strict:
            self._check_that_optimizers_train_the_model(names)
        return {
            "dense": dense,
            "optimizer": self._found.optimizers.state(self._rows_of()),
            "fused": [
                {"shards": [[*place] for place in self._places(source)], "counters": source.counters()}
                for source in self._found.fused
            ],
            "replicated": self._found.replicated,
        }

    def differences(self, fields: Mapping[str, Sequence[Field]], state: Mapping[str, Any]) -> Sequence[Difference]:
        saved = saved_rows(fields, state)
        self._found.optimizers.names = parameter_names(self._model)
        found = [
            *(difference for source in self._found.sources for difference in source.differences(saved)),
            *self._found.dense.differences(state["dense"], self._absent_as_built),
            *self._found.optimizers.differences(state["optimizer"], _restored(fields, state)),
        ]
        for source, counters in zip(self._found.fused, self._counters_of(state["fused"]), strict=True):
            if counters is None and self._steps_before(source, state["optimizer"]) is None:
                found.append(Difference(f"the checkpoint has no fused optimizer of {source.places[0].table!r}"))
        return found

    def prepare_restore(self, fields: Mapping[str, Sequence[Field]], state: Mapping[str, Any]) -> Sequence[Table]:
        self._fields, saved = fields, saved_rows(fields, state)
        for source in self._found.sources:
            source.prepare_restore(saved)
        return self.tables()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._found.optimizers.names = parameter_names(self._model)
        self._found.dense.load(state["dense"], self._absent_as_built)
        self._found.optimizers.load(state["optimizer"], _restored(self._fields, state))
        for source, counters in zip(self._found.fused, self._counters_of(state["fused"]), strict=True):
            if counters is not None:
                source.load_counters(counters)
            elif (step := self._steps_before(source, state["optimizer"])) is not None:
                source.load_step(step)
        self._updated_in_backward = False
        for each in self._found.sources:
            each.rows_are_restored()

    def _check_that_a_resume_finds_the_same(self, dense: Mapping[str, Any]) -> None:
        """A resume begins with the model as the Checkpointer was given it."""
        then = self._forms
        kept = {n: form for n, form in then.items() if form is not None and n in dense}
        tables = {t.shard.table for t in self._tables if t.shard.dtype != self._dtypes.get(t.shard.table)}
        found = [
            ("were added", dense.keys() - then.keys() - self._absent if self._strict else set()),
            ("were removed", then.keys() - dense.keys() - self._absent_as_built if self._strict else set()),
            ("have another shape", {n for n, form in kept.items() if dense[n].shape != form.shape}),
            ("have another dtype", {n for n, form in kept.items() if dense[n].dtype != form.dtype} | tables),
        ]
        told = [f"{_named(names)} {what}" for what, names in found if names]
        if told:
            raise SaveError(
                f"the model is not as it was when the Checkpointer was made or resumed: {'; '.join(told)}. A resume "
                "begins with the model as it is built and would refuse this checkpoint. Make such changes before the "
                "Checkpointer; after them, close this one and make a new one"
            )

    def _check_that_optimizers_train_the_model(self, names: Mapping[int, str]) -> None:
        """Args: names: of the model's parameters now, by id."""
        orphans = {
            was
            for leaf in self._found.optimizers.leaves
            for parameter, _ in leaf.groups()
            if id(parameter) not in names and (was := self._trained.get(leaf.name, {}).get(id(parameter))) is not None
        }
        if orphans:
            raise SaveError(
                f"{_named(orphans)} of the model are not what the optimizer trains any more: other parameters have "
                "taken their place in the model (load_state_dict(assign=True), an assignment), and it goes on with the "
                "old ones, so that a resume would refuse this checkpoint. Load without assign=True, or give the "
                "optimizer the new parameters, with a new optimizer in a new Checkpointer at best"
            )

    def _warn_of_optimizers_that_do_not_fit(self) -> None:
        """The run that is resumed would be another one, and nothing else would say so."""
        names = parameter_names(self._model)
        held = {
            id(p) for leaf in self._found.optimizers.leaves for p, _ in leaf.groups()
        } | self._found.fused_parameters
        without = [names[id(p)] for p in parameters(self._model) if p.requires_grad and id(p) not in held]
        if without:
            log.warning(
                "no optimizer was given for %d trainable parameters of the model (%s%s): if one trains them, its state "
                "is not saved and a resumed run is another one; give every optimizer (optimizer=[...]), also those of "
                "nn.Embedding",
                len(without), ", ".join(without[:_NAMED]), ", ..." if len(without) > _NAMED else "",
            )  # fmt: skip
        for leaf in self._found.optimizers.leaves:
            if not any(id(p) in names for p, _ in leaf.groups()):
                log.warning("optimizer %r trains no parameter of this model: was it made for another one?", leaf.name)

    def _watch_sources(self) -> None:
        assert self._mark is not None
        assert self._mark_all is not None
        base = 0
        for source in self._found.sources:
            source.watch(*_numbered_from(base, self._noting_updates(source), self._mark_all))
            base += len(source.tables())
        for leaf in self._found.optimizers.leaves:
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
            parameter.requires_grad and id(parameter) not in self._found.fused_parameters
            for leaf in self._found.optimizers.leaves
            if not leaf.in_backward
            for parameter, _ in leaf.groups()
        )

    def _follow_changes(self) -> None:
        """Go on with what has taken the place of a table's modules: kernels after a resharding, a module built anew.

        Raises:
            MismatchError: the tables themselves are others now. Nothing is forgotten, so that it is raised again.
        """
        known = self._found
        if structure_of(self._model, known.collections, known.closed) == known.structure:
            return
        found = discover(self._model, self._given)
        if list(found.shapes.items()) != list(known.shapes.items()):
            raise MismatchError(_what_changed(known.shapes, found.shapes))
        mark, mark_all = self._mark, self._mark_all
        self.unwatch()
        self._found = found
        if mark is not None and mark_all is not None:
            self.watch(mark, mark_all)
            for index in range(len(found.shapes)):
                mark_all(index)  # nobody watched the new modules until now

    def _rows_of(self) -> Callable[[torch.Tensor], int | None]:
        rows = {id(m.parameter): m.parameter.shape[0] for m in self._found.members}
        return lambda parameter: rows.get(id(parameter))

    @staticmethod
    def _places(source: FusedTables) -> list[tuple[str, int, int]]:
        return [(p.table, p.row_start, p.col_start) for p in source.places]

    def _counters_of(self, saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
        """For each TBE the saved counters of one of its shards, else (after resharding) of any shard of its tables."""
        by_shard = {tuple(shard): entry["counters"] for entry in saved for shard in entry["shards"]}
        by_table = {shard[0]: entry["counters"] for entry in reversed(saved) for shard in entry["shards"]}
        found = []
        for source in self._found.fused:
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


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(map(repr, ordered[:_NAMED])) + (f" and {len(ordered) - _NAMED} more" * (len(ordered) > _NAMED))


def _what_changed(before: Shapes, after: Shapes) -> str:
    found = [
        ("were added", {place[0] for place in after.keys() - before.keys()}),
        ("were removed", {place[0] for place in before.keys() - after.keys()}),
        ("have another shape or optimizer", {p[0] for p in before.keys() & after.keys() if before[p] != after[p]}),
    ]
    told = "; ".join(f"{_named(tables)} {what}" for what, tables in found if tables) or "their order"
    return (
        f"the model was rebuilt or resharded, and its tables or shards are not those that it had: {told}. Close this "
        "Checkpointer and make a new one"
    )


def _restored(fields: Mapping[str, Sequence[Field]], state: Mapping[str, Any]) -> dict[str, RestoredTable]:
    """The tables of a checkpoint by the names of the parameters that they may be."""
    iterations, found = _iterations_of(state["fused"]), {}
    for table, whole in fields.items():
        name = parameter_of(table)
        steps = iterations.get(table) or steps_of(name, state["optimizer"])
        found[name] = RestoredTable(frozenset(f.name for f in whole) - {WEIGHT}, steps)
    return found


def _iterations_of(fused: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How often each fused table was updated, by its name."""
    counted = [(entry["shards"], entry["counters"].get("iter")) for entry in fused]
    return {shard[0]: int(count) for shards, count in counted if count is not None for shard in shards}


def _numbered_from(base: int, mark: Mark, mark_all: Callable[[int], None]) -> tuple[Mark, Callable[[int], None]]:
    return (lambda table, rows: mark(base + table, rows)), (lambda table: mark_all(base + table))
