"""What a model consists of: its tables of all kinds, its dense state, and the optimizers of both.

It must not know who watches or saves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from incremental_ckpt.adapters import torch_nn, torchrec
from incremental_ckpt.adapters.dense import DenseState
from incremental_ckpt.adapters.fbgemm import FusedTables, Place, is_tbe, refuse_unreachable
from incremental_ckpt.adapters.optimizers import Optimizers, is_fused
from incremental_ckpt.adapters.row_state import SavedRows
from incremental_ckpt.adapters.walk import join, parameter_names, parameters, synchronised, walk
from incremental_ckpt.errors import CheckpointError
from incremental_ckpt.model import Difference, Mark, Table

Structure = tuple[object, ...]
Shapes = Mapping[tuple[str, int, int], tuple[int, int, bool]]
"""By table, first row and first column: rows, columns, and whether updates are announced."""


class TableSource(Protocol):
    """Tables that are updated in one way; they are numbered from 0 within the source."""

    in_backward: bool

    @property
    def owned_modules(self) -> tuple[nn.Module, ...]: ...

    def tables(self) -> Sequence[Table]: ...

    def differences(self, saved: Mapping[str, SavedRows]) -> list[Difference]: ...

    def prepare_restore(self, saved: Mapping[str, SavedRows]) -> None: ...

    def rows_are_restored(self) -> None: ...

    def watch(self, mark: Mark, mark_all: Callable[[int], None]) -> None: ...

    def unwatch(self) -> None: ...


@dataclass(frozen=True)
class Discovered:
    """A model taken apart.

    Attributes:
        fused: one for each TBE.
        members: tables and shards that are parameters; ``sources[-1]`` has them.
        sources: all tables, in the order of the adapter.
        replicated: names of the parameters that all ranks hold alike.
        fused_parameters: ids of those that are fused tables.
        modules: that tables were found in; ``structure`` notices when others take their place.
        shapes: of its shards.
    """

    optimizers: Optimizers
    fused: tuple[FusedTables, ...]
    members: tuple[torch_nn.TableParameter, ...]
    sources: tuple[TableSource, ...]
    dense: DenseState
    replicated: list[str]
    fused_parameters: frozenset[int]
    collections: tuple[nn.Module, ...]
    modules: tuple[nn.Module, ...]
    closed: frozenset[int]
    structure: Structure
    shapes: Shapes


def discover(model: nn.Module, given: object) -> Discovered:
    """Args: given: the optimizers, as a user gives them.

    Raises:
        CheckpointError: the model has tables whose rows cannot be reached, or several of one name.
    """
    names = parameter_names(model)
    in_backward = [
        (names[id(p)], optimizer)
        for p in parameters(model)
        for optimizer in getattr(p, "_in_backward_optimizers", ())
        if not is_fused(optimizer)
    ]
    optimizers = Optimizers(given, names, in_backward)
    closed: set[int] = set()
    fused: list[FusedTables] = []
    members: list[torch_nn.TableParameter] = []
    plain: list[tuple[str, nn.Module]] = []
    holders: dict[int, set[int]] = {}
    collections: list[nn.Module] = []
    for fqn, module in walk(model, closed):
        refuse_unreachable(fqn, module)
        for parameter in module._parameters.values():
            holders.setdefault(id(parameter), set()).add(id(module))
        if torchrec.kernel_lists(module) or torchrec.is_kernel(module):
            found = torchrec.tables_of(fqn, module)
            fused += found.fused
            members += found.parameters
            closed |= {id(m) for m in found.closed} | {id(m) for f in found.fused for m in f.owned_modules}
            collections.append(module)
        elif is_tbe(module):
            fused.append(FusedTables(module, _places_of_bare_tbe(fqn, module)))
            closed.add(id(module))
        elif torch_nn.gathers_rows(module):
            plain.append((fqn, module))
    alike = synchronised(model)
    members += torch_nn.table_parameters(plain, holders)
    members = [replace(m, replicated=m.replicated or id(m.parameter) in alike) for m in members]
    alike |= {id(m.parameter) for m in members if m.replicated}
    sources: tuple[TableSource, ...] = (*fused, torch_nn.ParameterTables(members, optimizers))
    below = [m for root in model.modules() if id(root) in closed for m in root.modules()]
    fused_parameters = {id(p) for m in below for p in m._parameters.values()} - {id(m.parameter) for m in members}
    return Discovered(
        optimizers=optimizers,
        fused=tuple(fused),
        members=tuple(members),
        sources=sources,
        dense=DenseState(model, closed, lambda: {id(m.parameter) for m in members}),
        replicated=sorted(name for key, name in names.items() if key in alike),
        fused_parameters=frozenset(fused_parameters),
        collections=tuple(collections),
        modules=tuple(module for _, module in plain),
        closed=frozenset(closed),
        structure=structure_of(model, collections, closed),
        shapes=_shapes(sources),
    )


def structure_of(model: nn.Module, collections: Sequence[nn.Module], closed: set[int] | frozenset[int]) -> Structure:
    """What changes when a model gets other tables, or other modules in their place."""
    kernels = (id(k) for c in collections for k in torchrec.kernel_lists(c))
    return (*kernels, *((n, id(m)) for n, m in walk(model, closed) if torch_nn.gathers_rows(m)))


def _shapes(sources: Sequence[TableSource]) -> Shapes:
    found: dict[tuple[str, int, int], tuple[int, int, bool]] = {}
    for table in (table for source in sources for table in source.tables()):
        shard = table.shard
        place = (shard.table, shard.row_start, shard.col_start)
        if place in found:
            raise CheckpointError(f"several tables of the model have the same name: {shard.table}")
        found[place] = (shard.rows, shard.cols, table.tracked)
    return found


def _places_of_bare_tbe(fqn: str, tbe: Any) -> list[Place]:
    names = tbe.table_names or [f"table_{index}" for index in range(len(tbe.embedding_specs))]
    return [
        Place(join(fqn, name), rows, cols) for name, (rows, cols, *_) in zip(names, tbe.embedding_specs, strict=True)
    ]
