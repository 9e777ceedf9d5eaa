"""The module tree with the names that parameters have in the unwrapped model.

It must not know tables, optimizers or checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

_TRANSPARENT = frozenset({"_dmp_wrapped_module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def walk(root: nn.Module, closed: Collection[int] = (), prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its names, parents first, without the prefixes that wrappers add.

    Args:
        closed: ids of modules that are left out with all below them; it is asked again after a module is yielded, so
            that a caller who adds to it keeps the walk out of what it has just met.
    """
    if id(root) in closed:
        return
    yield prefix, root
    if id(root) in closed:
        return
    for name, child in root._modules.items():
        if child is not None:
            yield from walk(child, closed, join(prefix, "" if _is_transparent(root, name) else name))


def parameter_names(root: nn.Module) -> dict[int, str]:
    """The first name of each parameter, by the parameter's id."""
    names: dict[int, str] = {}
    for prefix, module in walk(root):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), join(prefix, name))
    return names


def parameters(root: nn.Module) -> Iterator[torch.nn.Parameter]:
    """Each registered parameter once; unlike ``Module.parameters`` it sees no tensors that sharded modules make up."""
    seen: set[int] = set()
    for _, module in walk(root):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def synchronised(root: nn.Module) -> set[int]:
    """Ids of the parameters that DistributedDataParallel keeps alike on all ranks."""
    found: set[int] = set()
    for module in root.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            found |= {id(p) for p in module.parameters() if id(p) not in _left_alone(module)}
    return found


def _left_alone(ddp: nn.parallel.DistributedDataParallel) -> set[int]:
    ignored = set(getattr(ddp, "parameters_to_ignore", ()))
    return {id(p) for name, p in ddp.module.named_parameters() if name in ignored}


def class_names(thing: object) -> set[str]:
    """Names of the classes of an object, by which it is recognised without importing where they come from."""
    return {c.__name__ for c in type(thing).__mro__}


def _is_transparent(parent: nn.Module, child: str) -> bool:
    return child in _TRANSPARENT or (child == "module" and isinstance(parent, _WRAPPERS))
