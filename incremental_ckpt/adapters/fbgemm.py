"""FBGEMM's table-batched embeddings (TBEs): live rows, counters, and marks taken from the gradient of each lookup.

It must not know TorchRec's modules or checkpoints, and never imports FBGEMM: a TBE is known by the name of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from incremental_ckpt.adapters.row_state import SavedRows, differing
from incremental_ckpt.adapters.walk import class_names
from incremental_ckpt.errors import CheckpointError
from incremental_ckpt.model import WEIGHT, Difference, Field, Mark, Shard, Table

TBE_CLASS = "SplitTableBatchedEmbeddingBagsCodegen"
DENSE_TBE_CLASS = "DenseTableBatchedEmbeddingBagsCodegen"

# Their update changes the rows of its lookups and no others. EMAINPLACE and ENSEMBLE sweep whole tables in forward.
_ROW_LOCAL = frozenset({
    "SGD", "EXACT_SGD", "LARS_SGD", "ADAGRAD", "EXACT_ADAGRAD", "ROWWISE_ADAGRAD", "EXACT_ROWWISE_ADAGRAD",
    "ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB",
})  # fmt: skip
# FBGEMM numbers its state; torch's optimizers name it. A row's state has one name, whoever updates it, so that a table
# may be sharded, data-parallel or unsharded from one resume to the next.
_ADAGRAD, _ADAM = ("sum",), ("exp_avg", "exp_avg_sq")
_STATE_NAMES = {
    "ADAGRAD": _ADAGRAD, "EXACT_ADAGRAD": _ADAGRAD, "ROWWISE_ADAGRAD": _ADAGRAD, "EXACT_ROWWISE_ADAGRAD": _ADAGRAD,
    "EMAINPLACE_ROWWISE_ADAGRAD": _ADAGRAD,
    "ADAM": _ADAM, "PARTIAL_ROWWISE_ADAM": _ADAM, "LAMB": _ADAM, "PARTIAL_ROWWISE_LAMB": _ADAM,
    "ENSEMBLE_ROWWISE_ADAGRAD": ("momentum1", "momentum2"),
}  # fmt: skip
_COUNTERS = ("iter", "iter_cpu", "learning_rate_tensor", "max_counter")
_HYPERPARAMETERS = ("learning_rate", "eps", "beta1", "beta2", "weight_decay")  # the first in old versions only
_BUFFERS = tuple(
    f"{what}_{where}"
    for what in ("weights", "momentum1", "momentum2", "prev_iter", "row_counter")
    for where in ("dev", "host", "uvm")
)


@dataclass(frozen=True)
class Place:
    """Where one of a TBE's tables lies: its name, the whole table's shape, and the offsets of this part."""

    table: str
    table_rows: int
    table_cols: int
    row_start: int = 0
    col_start: int = 0


def is_tbe(module: nn.Module) -> bool:
    return TBE_CLASS in class_names(module)


def refuse_unreachable(fqn: str, module: nn.Module) -> None:
    """Raises CheckpointError for tables whose rows are no memory that can be read and written in place."""
    if "SSDTableBatchedEmbeddingBags" in class_names(module):
        raise CheckpointError(
            f"{fqn or 'the model'}: tables kept on SSD or in a key-value store cannot be checkpointed; "
            "use a fused or UVM kernel"
        )


class _Hook:
    """A hook in a module. A copy of the module, pickled or not, is watched by nobody: there it does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if self._call is not None:
            self._call(*arguments)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


class _ResetHook:
    """Stands before a TBE's own ``reset_embedding_weight_momentum``; in a copy of the TBE it is the copy's own."""

    def __init__(self, tbe: Any, call: Callable[..., Any]) -> None:
        self._tbe = tbe
        self._call = call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._call(*arguments, **named)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self._tbe, "reset_embedding_weight_momentum")  # of its class: this one is not there yet


class FusedTables:
    """The tables of one TBE.

    Args:
        tbe: a SplitTableBatchedEmbeddingBagsCodegen.
        places: one for each of its tables, in its order.
        param_groups: TorchRec's groups of the fused optimizers that feed this TBE its learning rate; they are live.
        repeated_in: modules whose parameters are views of the rows, through which they may be loaded.
    """

    in_backward = True

    def __init__(
        self,
        tbe: Any,
        places: Sequence[Place],
        param_groups: Sequence[dict[str, Any]] = (),
        repeated_in: Sequence[nn.Module] = (),
    ) -> None:
        self._tbe: Any = tbe
        self.places = tuple(places)
        self._groups = param_groups
        self._loaded_through = (self._tbe, *repeated_in)
        optimizer = self._tbe.optimizer.name
        self._tracked = optimizer in _ROW_LOCAL and not self._flag("_used_rowwise_adagrad_with_global_weight_decay")
        self._optimizer = optimizer
        self._runs = _runs(self._tbe.feature_table_map)
        self._tables: tuple[Table, ...] = ()
        self._pointers: tuple[int, ...] = ()
        self._versions: int | None = None
        self._updating = False
        self._handles: list[RemovableHandle] = []
        self._mark: Mark | None = None
        self._mark_all: Callable[[int], None] | None = None

    @property
    def owned_modules(self) -> tuple[nn.Module, ...]:
        return (self._tbe,)

    def rows_are_restored(self) -> None:
        """Rows were written past the version counters: whoever else watches the model is to notice."""
        for buffer in self._buffers():
            torch.autograd.graph.increment_version(buffer)
        if self._versions is not None:
            self._versions = self._version()

    def tables(self) -> Sequence[Table]:
        if self._cached():
            self._tbe.flush()
        self._look_for_edits()
        pointers = tuple(b.data_ptr() for b in self._buffers())
        if pointers != self._pointers or not self._tables:
            if self._tables:
                self._everything_changed()  # other memory has taken the place of the rows
            self._tables, self._pointers = self._build(), pointers
        return self._tables

    def differences(self, saved: Mapping[str, SavedRows]) -> list[Difference]:
        found, kind = [], f"fused {self._optimizer}"
        for shard in (table.shard for table in self.tables()):
            if (rows := saved.get(shard.table)) is None:
                continue
            kept = [
                replace(f, width=shard.table_cols) if f.width == shard.cols else f
                for f in shard.fields
                if f.name != WEIGHT
            ]
            if (difference := differing(shard.table, rows, kept, kind)) is not None:
                found.append(difference)
            elif rows.is_fused and rows.kind not in ("fused", kind):
                found.append(Difference(f"table {shard.table}: its optimizer is {kind}, in the checkpoint {rows.kind}"))
        return found

    def prepare_restore(self, _saved: Mapping[str, SavedRows]) -> None:
        """Rows are about to be written behind the cache, so nothing may stay in it. A TBE's fields always exist."""
        if self._cached():
            self._tbe.flush()
            self._tbe.reset_cache_states()

    def watch(self, mark: Mark, mark_all: Callable[[int], None]) -> None:
        self._mark, self._mark_all = mark, mark_all
        self._versions = self._version()
        self._handles = [self._tbe.register_forward_hook(_Hook(self._after_lookup))]
        if self._cached():  # else versions tell of every load
            loaded = _Hook(lambda _module, _keys: self._everything_changed())
            self._handles += [module.register_load_state_dict_post_hook(loaded) for module in self._loaded_through]
        self._tbe.reset_embedding_weight_momentum = _ResetHook(self._tbe, self._reset_rows)

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._tbe.__dict__.pop("reset_embedding_weight_momentum", None)
        self._handles, self._mark, self._mark_all, self._versions = [], None, None, None

    def counters(self) -> dict[str, Any]:
        """What the fused optimizer counts and is told beside the rows; ``state_dict()`` has none of it."""
        found: dict[str, Any] = {"optimizer": self._optimizer}
        for name in _COUNTERS:
            value = getattr(self._tbe, name, None)
            if isinstance(value, torch.Tensor):
                found[name] = value.detach()
        arguments = self._tbe.optimizer_args
        found["hyperparameters"] = {n: getattr(arguments, n) for n in _HYPERPARAMETERS if hasattr(arguments, n)}
        found["gwd_lower_bound"] = self._tbe.gwd_lower_bound
        found["param_groups"] = [{k: v for k, v in group.items() if k != "params"} for group in self._groups]
        return found

    def load_step(self, step: int) -> None:
        """Count on from the steps of another optimizer, which has updated these tables before."""
        for name in ("iter", "iter_cpu"):
            live = getattr(self._tbe, name, None)
            if isinstance(live, torch.Tensor):
                live.detach().fill_(step)

    def load_counters(self, saved: Mapping[str, Any]) -> None:
        for name in _COUNTERS:
            live = getattr(self._tbe, name, None)
            if isinstance(live, torch.Tensor) and name in saved:
                live.detach().copy_(saved[name])
        self._tbe.optimizer_args = self._tbe.optimizer_args._replace(**saved["hyperparameters"])
        self._tbe.gwd_lower_bound = saved["gwd_lower_bound"]
        for live_group, saved_group in zip(self._groups, saved["param_groups"], strict=False):
            live_group.update(deepcopy(dict(saved_group)))

    def _build(self) -> tuple[Table, ...]:
        names = self._state_names()
        states = self._tbe.split_optimizer_states() if names else []
        tables = []
        for index, weight in enumerate(self._tbe.split_embedding_weights()):
            place = self.places[index]
            tensors = {WEIGHT: weight}
            tensors |= dict(zip(names, states[index], strict=True)) if names else {}
            # `.data` has a version counter of its own: what is written through these views is no edit of the user's.
            views = {k: (t.data if t.dim() == 2 else t.data.unsqueeze(1)) for k, t in tensors.items()}
            fields = tuple(Field(k, str(t.dtype).removeprefix("torch."), t.shape[1]) for k, t in views.items())
            rows, cols = self._tbe.embedding_specs[index][:2]
            shard = Shard(
                place.table, place.table_rows, place.table_cols, place.row_start, rows, place.col_start, cols, fields
            )
            tables.append(Table(shard, views, self._tracked, edited=self._edited))
        return tuple(tables)

    def _state_names(self) -> list[str]:
        """Names of what ``split_optimizer_states`` returns for each table, in its order."""
        if self._optimizer in ("EXACT_SGD", "NONE"):
            return []
        counter = self._flag("_used_rowwise_adagrad_with_counter")
        names = [*_STATE_NAMES.get(self._optimizer, ("momentum1",))]
        if counter or self._flag("_used_rowwise_adagrad_with_global_weight_decay"):
            names.append("prev_iter")
        if counter or (self._optimizer == "ADAM" and self._flag("use_rowwise_bias_correction")):
            names.append("row_counter")
        return names

    def _after_lookup(self, tbe: Any, _args: Any, output: torch.Tensor) -> None:
        if not output.requires_grad:
            return  # no backward can follow, so no update
        indices, offsets, batches = tbe._indices, tbe._offsets, tbe._vbe_B_offsets
        output.register_hook(lambda _grad: self._before_update(indices, offsets, batches))
        node: Any = output.grad_fn
        if node is not None:
            node.register_hook(lambda _inputs, _outputs: self._after_update())

    def _before_update(self, indices: torch.Tensor, offsets: torch.Tensor, batches: torch.Tensor | None) -> None:
        if self._mark is None:
            return  # a lookup made while watched whose backward comes after unwatch
        self._look_for_edits()
        self._updating = True
        features, bags, ids = len(self._tbe.feature_table_map), offsets.numel() - 1, indices.numel()
        if bags == 0 or ids == 0:
            return
        if batches is not None:
            starts = offsets.index_select(0, batches.to(device=offsets.device, dtype=torch.int64))
        else:
            starts = offsets[:: bags // features]
        if indices.device.type == "cpu":
            bounds = starts.tolist()
            for table, first, end in self._runs:
                rows = indices[bounds[first] : bounds[end]]
                if rows.numel():
                    self._mark(table, rows)
            return
        for table, first, end in self._runs:
            height = self._tbe.embedding_specs[table][0]
            if height:
                self._mark(table, rows_without_sync(indices, starts[first], starts[end], height))

    def _after_update(self) -> None:
        if self._versions is not None:
            self._versions = self._version()  # the kernel may have counted its own writes
        self._updating = False

    def _edited(self) -> bool:
        """See Table.edited. The order of the reads matters: an update that begins or ends meanwhile is none."""
        if self._versions is None:
            return False
        version = self._version()
        return version != self._versions and not self._updating and version > self._versions

    def _reset_rows(
        self,
        pruned_indices: torch.Tensor,
        pruned_indices_offsets: torch.Tensor,
        logical_table_ids: torch.Tensor,
        buffer_ids: torch.Tensor,
    ) -> Any:
        """Stands before the TBE's method of this name, with which managed collisions evict rows."""
        if self._mark is not None:
            bounds = pruned_indices_offsets.tolist()
            for position, table in enumerate(logical_table_ids.tolist()):
                rows = pruned_indices[bounds[position] : bounds[position + 1]]
                self._mark(table, rows.to(self._tables[table].tensors[WEIGHT].device) if self._tables else rows)
        reset = type(self._tbe).reset_embedding_weight_momentum
        return reset(self._tbe, pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids)

    def _look_for_edits(self) -> None:
        if self._versions is not None and self._version() != self._versions:
            self._everything_changed()

    def _everything_changed(self) -> None:
        if self._mark_all is not None:
            for index in range(len(self.places)):
                self._mark_all(index)
            self._versions = self._version()

    def _version(self) -> int:
        # The cache's own traffic writes to the buffers, so that versions tell nothing there.
        return 0 if self._cached() else sum(b._version for b in self._buffers())

    def _buffers(self) -> list[torch.Tensor]:
        parameters, buffers = self._tbe._parameters, self._tbe._buffers
        found = (parameters.get(name, buffers.get(name)) for name in _BUFFERS)
        return [b for b in found if b is not None]

    def _cached(self) -> bool:
        cache = getattr(self._tbe, "lxu_cache_weights", None)
        return isinstance(cache, torch.Tensor) and cache.numel() > 0

    def _flag(self, name: str) -> bool:
        return bool(getattr(self._tbe, name, False))


def rows_without_sync(indices: torch.Tensor, first: torch.Tensor, end: torch.Tensor, rows: int) -> torch.Tensor:
    """The ids ``indices[first:end]`` where only the device knows first and end.

    The result is as long as ``indices``; all places outside the slice repeat its first id (of an empty slice: some
    valid id). So it may name one row too many and never leaves one out.

    Args:
        indices: int32 or int64, at least one.
        first, end: integer tensors without dimensions, on the same device.
        rows: of the table, at least one.
    """
    position = torch.arange(indices.numel(), device=indices.device)
    inside = (position >= first) & (position < end) & (indices >= 0)  # -1: a pruned row, which kernels pass by
    stand_in = indices.index_select(0, first.clamp(max=indices.numel() - 1).long().view(1)).clamp(0, rows - 1)
    return torch.where(inside, indices, stand_in)


def _runs(feature_table_map: Sequence[int]) -> list[tuple[int, int, int]]:
    """(table, first feature, end feature): neighbouring features of one table are marked at once."""
    runs: list[tuple[int, int, int]] = []
    for feature, table in enumerate(feature_table_map):
        if runs and runs[-1][0] == table:
            runs[-1] = (table, runs[-1][1], feature + 1)
        else:
            runs.append((table, feature, feature + 1))
    return runs
