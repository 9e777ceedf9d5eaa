"""TorchRec's collections of tables, sharded or fused: their kernels, their names, and which part of each.

It must not know how rows are marked or saved, and never imports TorchRec: modules are known by what they carry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from incremental_ckpt.adapters.fbgemm import DENSE_TBE_CLASS, FusedTables, Place, is_tbe, refuse_unreachable
from incremental_ckpt.adapters.optimizers import is_fused
from incremental_ckpt.adapters.torch_nn import Cut, TableParameter
from incremental_ckpt.adapters.walk import class_names, join
from incremental_ckpt.errors import CheckpointError

# Kernels hang in plain lists, which named_modules() does not see.
_KERNEL_LISTS = ("_lookups", "_emb_modules")
_COLLECTIONS = ("embedding_bags", "embeddings")


@dataclass
class Found:
    """The tables of one module.

    Attributes:
        fused: one for each TBE.
        parameters: tables that a torch optimizer updates (data parallel, dense kernel).
        closed: modules that only repeat these tables' parameters under other names.
    """

    fused: list[FusedTables] = field(default_factory=list)
    parameters: list[TableParameter] = field(default_factory=list)
    closed: list[nn.Module] = field(default_factory=list)


def kernel_lists(module: nn.Module) -> list[nn.Module]:
    """What a sharded or fused collection keeps its kernels in; resharding replaces the members."""
    found: list[nn.Module] = []
    for name in _KERNEL_LISTS:
        members = vars(module).get(name)
        if isinstance(members, list):
            found += [m for m in members if isinstance(m, nn.Module)]
    return found


def is_kernel(module: nn.Module) -> bool:
    return isinstance(module._modules.get("_emb_module"), nn.Module) and _configs(module) is not None


def tables_of(fqn: str, module: nn.Module) -> Found:
    """The tables of a collection (found through its plain lists) or of a single kernel.

    Raises:
        CheckpointError: for a kernel whose rows cannot be reached.
    """
    found = Found()
    name = next((n for n in _COLLECTIONS if isinstance(module._modules.get(n), nn.ModuleDict)), None)
    collection: Any = module._modules[name] if name else None
    if collection is not None:
        found.closed.append(collection)
    prefix = join(fqn, name or "")
    roots = kernel_lists(module) or [module]
    for kernel in (m for root in roots for m in root.modules() if is_kernel(m)):
        _add_kernel(found, prefix, kernel, collection)
    return found


def _add_kernel(found: Found, prefix: str, kernel: nn.Module, collection: Any) -> None:
    configs = _configs(kernel)
    tbe = kernel._modules["_emb_module"]
    assert configs is not None
    assert tbe is not None
    names = [c.name for c in configs]
    refuse_unreachable(join(prefix, ", ".join(names)), tbe)
    if is_tbe(tbe):
        places = [_place(join(prefix, c.name), c) for c in configs]
        groups = list(_groups(kernel, names, collection))
        found.fused.append(FusedTables(tbe, places, groups, found.closed))
    elif DENSE_TBE_CLASS in class_names(tbe) and collection is not None:
        found.parameters += _dense_shards(prefix, configs, collection)
    else:
        raise CheckpointError(
            f"{join(prefix, ', '.join(names))}: no way to the rows of a {type(tbe).__name__} is known"
        )


def _dense_shards(prefix: str, configs: list[Any], collection: Any) -> Iterator[TableParameter]:
    """The tables of a dense kernel. All shards of a table there are one parameter, one after the other."""
    begins: dict[str, int] = {}
    for config in configs:
        name, member = config.name, collection[config.name]
        cut: Cut | None = None
        if config.local_metadata is not None:
            row_start, col_start = config.local_metadata.shard_offsets
            begin = begins.get(name, 0)
            begins[name] = begin + config.local_rows
            cut = Cut(config.num_embeddings, config.embedding_dim, row_start, col_start, begin, config.local_rows)
            if begins[name] > member.weight.shape[0] or config.local_cols != member.weight.shape[1]:
                raise CheckpointError(f"{join(prefix, name)}: no way to the rows of its column shards is known")
        # Without a place of its own a table is data-parallel: all ranks hold it, and their gradients are summed.
        yield TableParameter(join(prefix, name), member, "weight", (), False, replicated=cut is None, cut=cut)


def _configs(kernel: nn.Module) -> list[Any] | None:
    config = vars(kernel).get("_config")
    tables = getattr(config, "embedding_tables", None) or vars(kernel).get("_embedding_tables")
    return tables if isinstance(tables, list) else None


def _place(name: str, config: Any) -> Place:
    metadata = getattr(config, "local_metadata", None)
    offsets = [*(metadata.shard_offsets if metadata is not None else ()), 0, 0]
    rows, cols = (offsets[0], offsets[1]) if metadata is not None else (0, 0)
    return Place(name, config.num_embeddings, config.embedding_dim, rows, cols)


def _groups(kernel: nn.Module, names: list[str], collection: Any) -> Iterator[dict[str, Any]]:
    """The groups that feed a kernel its learning rate: its own optimizer's and those on its tables' parameters."""
    optimizers = [vars(kernel).get("_optim")]
    for name in dict.fromkeys(names):
        member = collection[name] if collection is not None and name in collection else None
        optimizers += getattr(getattr(member, "weight", None), "_in_backward_optimizers", [])
    for optimizer in optimizers:
        if optimizer is not None and is_fused(optimizer):
            yield from optimizer.param_groups
