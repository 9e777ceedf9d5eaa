"""Parameters, persistent buffers and extra state that belong to no table, by name, saved whole with every checkpoint.

It must not know tables, optimizers or checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from incremental_ckpt.adapters.walk import class_names, join, walk
from incremental_ckpt.errors import SaveError
from incremental_ckpt.model import DTYPE_BYTES, Difference

_EXTRA = "_extra_state"


class DenseState:
    """The dense state of a model.

    Args:
        model: the whole model.
        closed: ids of modules that are tables' own, with all below them.
        owned: gives the ids of the parameters that are tables at present.
    """

    def __init__(self, model: nn.Module, closed: Collection[int], owned: Callable[[], Collection[int]]) -> None:
        self._model = model
        self._closed = closed
        self._owned = owned

    def state(self) -> dict[str, Any]:
        """Live tensors (no copies) by name; a tied tensor is one object under each of its names."""
        found: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        views: dict[int, torch.Tensor] = {}
        for name, tensor in self._tensors(lambda n, m: extra.update({n: m.get_extra_state()})):
            if is_lazy(tensor):
                raise SaveError(f"parameter {name!r} has no shape yet: run a batch through the model before saving")
            if (why := why_unwritable(tensor)) is not None:
                raise SaveError(f"{name!r} of the model {why}, and cannot be saved")
            if id(tensor) not in views:
                views[id(tensor)] = tensor.detach()
            found[name] = views[id(tensor)]
        return found | extra

    def differences(self, saved: Mapping[str, Any]) -> list[Difference]:
        """How the model differs from ``saved``."""
        found, known = [], set()
        for name, tensor in self._tensors():
            known.add(name)
            value = saved.get(name)
            if name not in saved:
                found.append(Difference(f"{name!r} of the model is not in the checkpoint"))
            elif not isinstance(value, torch.Tensor):
                found.append(Difference(f"{name!r} is a tensor in the model, none in the checkpoint", fatal=True))
            elif is_lazy(tensor):
                found.append(Difference(f"{name!r} has no shape in the model yet: run a batch through it", fatal=True))
            elif value.shape != tensor.shape or value.dtype != tensor.dtype:
                mine, theirs = (f"{tuple(t.shape)} {t.dtype}" for t in (tensor, value))
                found.append(Difference(f"{name!r} is {mine} in the model, {theirs} in the checkpoint", fatal=True))
        for name, _, _ in self._absent_buffers():
            known.add(name)
        for name, _ in self._with_extra_state():
            known.add(name)
            if name not in saved:
                found.append(Difference(f"{name!r} of the model is not in the checkpoint"))
        found += [Difference(f"{n!r} of the checkpoint is not in the model") for n in saved if n not in known]
        return found

    def load(self, saved: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors():
                if name in saved:
                    tensor.copy_(saved[name])
        for name, module, key in self._absent_buffers():
            if isinstance(value := saved.get(name), torch.Tensor):
                beside = next((t for t in (*module.parameters(), *module.buffers())), value)
                module._buffers[key] = value.to(beside.device, copy=True)
        for name, module in self._with_extra_state():
            if name in saved:
                module.set_extra_state(deepcopy(saved[name]))

    def shapes(self) -> dict[str, torch.Size | None]:
        """Of the parameters by name; None for what may take another shape: buffers, and what has no shape yet."""
        found: dict[str, torch.Size | None] = {}
        for name, tensor in self._tensors(lambda n, _: found.update({n: None})):
            found[name] = tensor.shape if isinstance(tensor, nn.Parameter) and not is_lazy(tensor) else None
        return found

    def absent(self) -> set[str]:
        """Names of buffers that are yet to be made."""
        return {name for name, _, _ in self._absent_buffers()}

    def _absent_buffers(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Those that are registered and None: the module makes them when it first knows their shape."""
        for prefix, module in walk(self._model, self._closed):
            for key, buffer in module._buffers.items():
                if buffer is None and key not in module._non_persistent_buffers_set:
                    yield join(prefix, key), module, key

    def _tensors(self, extra: Callable[[str, nn.Module], None] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Args: extra: told of the modules with extra state, and its name."""
        owned = self._owned()
        for prefix, module in walk(self._model, self._closed):
            if extra is not None and type(module).get_extra_state is not nn.Module.get_extra_state:
                extra(join(prefix, _EXTRA), module)
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in owned:
                    yield join(prefix, key), parameter
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    yield join(prefix, key), buffer

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for prefix, module in walk(self._model, self._closed):
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield join(prefix, _EXTRA), module


def why_unwritable(tensor: torch.Tensor) -> str | None:
    """What is in the way of reading a tensor's elements as bytes and writing them back; None if nothing is."""
    if tensor.is_meta:
        return "is on the meta device, where it has no values (to_empty() or a materialisation comes first)"
    if type(tensor) not in (torch.Tensor, nn.Parameter) and "DTensor" in class_names(tensor):
        return (
            "is a DTensor (FSDP2 or tensor parallel), of which each rank holds a part that this library does not know"
        )
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout} instead of a dense one"
    if tensor.is_quantized or str(tensor.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        return f"has the dtype {tensor.dtype}, which has no place in the format"
    return None
