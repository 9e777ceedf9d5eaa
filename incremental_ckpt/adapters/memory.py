"""Live tensors as memory that values are read from and written back to: what stands in the way, and how it is written.

It must not know whose tensors they are, nor what the values mean.
"""

from __future__ import annotations

import torch
from torch import nn

from incremental_ckpt.adapters.walk import class_names
from incremental_ckpt.model import DTYPE_BYTES


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


def is_shared_within(tensor: torch.Tensor) -> bool:
    """Whether several elements of a strided tensor lie in the same memory, as after ``expand``.

    Strides that interleave without meeting, which no function of torch makes, count as well.
    """
    if not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted((t, s) for s, t in zip(tensor.shape, tensor.stride(), strict=True) if s > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def can_hold(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether elements of a tensor that lie in the same memory have the same bits in ``value``, of its shape and
    dtype."""
    if not is_shared_within(tensor):
        return True
    at, wanted = _places(tensor), _as_bytes(value)
    memory = torch.zeros(int(at.max()) + 1, wanted.shape[1], dtype=torch.uint8)
    memory[at] = wanted
    return torch.equal(memory[at], wanted)


def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value that it can hold, of the same shape and dtype, into a live tensor.

    Tensors of inference mode are written in that mode, and memory that elements share is written once.
    """
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        live = tensor.detach()
        if not is_shared_within(live):
            live.copy_(value)
            return
        at = _places(live)
        memory = live.as_strided((int(at.max()) + 1,), (1,), live.storage_offset())
        memory.view(torch.uint8).view(-1, live.element_size())[at.to(live.device)] = _as_bytes(value).to(live.device)


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Where each element lies, in elements from the first: ``int64 [elements]``."""
    at = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = (at[:, None] + torch.arange(size) * stride).reshape(-1)
    return at


def _as_bytes(value: torch.Tensor) -> torch.Tensor:
    """``uint8 [elements, bytes of one]``."""
    return value.detach().contiguous().reshape(-1, 1).view(torch.uint8)
