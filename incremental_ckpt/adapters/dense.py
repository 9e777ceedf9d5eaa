"""Parameters, persistent buffers and extra state that belong to no table, by name, saved whole with every checkpoint.

It must not know tables, optimizers or checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from incremental_ckpt.adapters.memory import can_hold, is_shared_within, why_unwritable, write
from incremental_ckpt.adapters.walk import join, walk
from incremental_ckpt.errors import SaveError
from incremental_ckpt.model import Difference

log = logging.getLogger("incremental_ckpt")

_EXTRA = "_extra_state"


@dataclass(frozen=True)
class Form:
    """What a parameter keeps as long as a run goes on."""

    shape: torch.Size
    dtype: torch.dtype


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

    def differences(self, saved: Mapping[str, Any], may_be_absent: Collection[str] = ()) -> list[Difference]:
        """How the model differs from ``saved``.

        Args:
            may_be_absent: names of buffers that are None at first: where ``saved`` has none, it is from before they
                were made.
        """
        found, known = [], set()
        for name, tensor in self._tensors():
            known.add(name)
            value = saved.get(name)
            if name not in saved:
                if name not in may_be_absent:
                    found.append(Difference(f"{name!r} of the model is not in the checkpoint"))
            elif not isinstance(value, torch.Tensor):
                found.append(Difference(f"{name!r} is a tensor in the model, none in the checkpoint", fatal=True))
            elif is_lazy(tensor):
                found.append(Difference(f"{name!r} has no shape in the model yet: run a batch through it", fatal=True))
            elif (why := why_unwritable(tensor)) is not None:
                found.append(Difference(f"{name!r} of the model {why}", fatal=True))
            elif not isinstance(tensor, nn.Parameter):
                continue  # what it cannot hold takes its place
            elif not _alike(value, tensor):
                text = f"{name!r} is {_form(tensor)} in the model, {_form(value)} in the checkpoint"
                found.append(Difference(text, fatal=True))
            elif not can_hold(tensor, value):
                text = (
                    f"elements of {name!r} share memory in the model (expand, as_strided) and have different values in "
                    "the checkpoint: give the model a copy (.clone())"
                )
                found.append(Difference(text, fatal=True))
        for name, _, _ in self._absent_buffers():
            known.add(name)
        for name, _ in self._with_extra_state():
            known.add(name)
            if name not in saved:
                found.append(Difference(f"{name!r} of the model is not in the checkpoint"))
        found += [Difference(f"{n!r} of the checkpoint is not in the model") for n in saved if n not in known]
        return found

    def load(self, saved: Mapping[str, Any], may_be_absent: Collection[str] = ()) -> None:
        """Buffers that cannot hold what was saved (of another shape or dtype) are replaced: so was the run's own.

        Args:
            may_be_absent: as for ``differences``; these are None again.
        """
        others: dict[int, torch.Tensor] = {}
        for name, tensor in self._tensors():
            if name not in saved:
                continue
            if _alike(saved[name], tensor) and can_hold(tensor, saved[name]):
                write(tensor, saved[name])
                continue
            others[id(tensor)] = saved[name].to(tensor.device, copy=True)
            shared = ", of which elements share memory," if is_shared_within(tensor) else ""
            log.warning(
                "buffer %r is %s%s in the model and was %s in the run that is resumed: the run's takes its place",
                name, _form(tensor), shared, _form(saved[name]),
            )  # fmt: skip
        for prefix, module in walk(self._model, self._closed):
            for key, buffer in module._buffers.items():
                name = join(prefix, key)
                unmade = name in may_be_absent and name not in saved
                module._buffers[key] = None if unmade else others.get(id(buffer), buffer)
        for name, module, key in self._absent_buffers():
            if isinstance(value := saved.get(name), torch.Tensor):
                beside = next((t for t in (*module.parameters(), *module.buffers())), value)
                module._buffers[key] = value.to(beside.device, copy=True)
        for name, module in self._with_extra_state():
            if name in saved:
                module.set_extra_state(deepcopy(saved[name]))

    def forms(self) -> dict[str, Form | None]:
        """Of the parameters by name; None for what may take another: buffers, and what has no shape yet."""
        found: dict[str, Form | None] = {}
        for name, tensor in self._tensors(lambda n, _: found.update({n: None})):
            keeps = isinstance(tensor, nn.Parameter) and not is_lazy(tensor)
            found[name] = Form(tensor.shape, tensor.dtype) if keeps else None
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


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
