"""Adapters: where a model's rows are, when they change, and all of its state that is not rows.

They must not know the tracker, the snapshot or anything that saves; TorchRec and FBGEMM are met here and nowhere else.
"""

from __future__ import annotations

from torch import nn

from incremental_ckpt.adapters.composite import CompositeAdapter
from incremental_ckpt.model import ModelAdapter

__all__ = ["adapt"]


def adapt(model: nn.Module, optimizer: object = None, *, strict: bool = True) -> ModelAdapter:
    """The adapter of a model.

    Args:
        model: any module: DistributedModelParallel, sharded, fused or plain collections, FBGEMM TBEs,
            ``nn.Embedding(Bag)``, in any mixture.
        optimizer: a torch optimizer, a TorchRec KeyedOptimizer (combined, wrapped), a list or a mapping of them, or
            None. Fused optimizers need not be given; where they are, their rows are not saved twice.
        strict: parameters and buffers may not come or go under way, since a strict resume would refuse them.

    Raises:
        CheckpointError: the model has tables whose rows cannot be reached (SSD, key-value stores).
        TypeError: the model is no module, or an optimizer is none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model takes an nn.Module, not {type(model).__name__}")
    return CompositeAdapter(model, optimizer, strict=strict)
