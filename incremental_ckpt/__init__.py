"""Incremental checkpoints for recommendation models.

The names here are all there is to rely on; they are loaded when first used, so that the command line loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from incremental_ckpt.checkpointer import Checkpointer
    from incremental_ckpt.codecs import AutoCodec
    from incremental_ckpt.compaction import compact
    from incremental_ckpt.errors import (
        CheckpointError,
        ConflictError,
        CorruptionError,
        FormatError,
        MismatchError,
        NotFoundError,
        SaveError,
        StorageError,
    )
    from incremental_ckpt.events import (
        CompactEvent,
        FailureEvent,
        IntervalEvent,
        PruneEvent,
        ResumeEvent,
        SaveEvent,
        SkipEvent,
    )
    from incremental_ckpt.exporting import export
    from incremental_ckpt.flight import SaveHandle
    from incremental_ckpt.importing import import_checkpoint
    from incremental_ckpt.model import CheckpointInfo, Progress
    from incremental_ckpt.policy import Adaptive, EveryEpoch, EverySeconds, EverySteps, KeepBest, KeepEvery, KeepLast
    from incremental_ckpt.pruning import prune
    from incremental_ckpt.reading import PairedReader
    from incremental_ckpt.repository import Repository
    from incremental_ckpt.settings import Settings
    from incremental_ckpt.storage import Store, open_store

_HOMES = {
    "Checkpointer": "checkpointer", "AutoCodec": "codecs",
    "SaveHandle": "flight",
    "Settings": "settings",
    "EverySteps": "policy", "EverySeconds": "policy", "EveryEpoch": "policy", "Adaptive": "policy",
    "KeepLast": "policy", "KeepBest": "policy", "KeepEvery": "policy",
    "compact": "compaction", "prune": "pruning", "export": "exporting", "import_checkpoint": "importing",
    "PairedReader": "reading",
    "CheckpointInfo": "model", "Progress": "model",
    "SaveEvent": "events", "FailureEvent": "events", "SkipEvent": "events", "ResumeEvent": "events",
    "IntervalEvent": "events", "PruneEvent": "events", "CompactEvent": "events",
    "Repository": "repository",
    "Store": "storage", "open_store": "storage",
    "CheckpointError": "errors", "NotFoundError": "errors", "ConflictError": "errors", "CorruptionError": "errors",
    "FormatError": "errors", "MismatchError": "errors", "SaveError": "errors", "StorageError": "errors",
}  # fmt: skip

__all__ = [
    "Adaptive",
    "AutoCodec",
    "CheckpointError",
    "CheckpointInfo",
    "Checkpointer",
    "CompactEvent",
    "ConflictError",
    "CorruptionError",
    "EveryEpoch",
    "EverySeconds",
    "EverySteps",
    "FailureEvent",
    "FormatError",
    "IntervalEvent",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "MismatchError",
    "NotFoundError",
    "PairedReader",
    "Progress",
    "PruneEvent",
    "Repository",
    "ResumeEvent",
    "SaveError",
    "SaveEvent",
    "SaveHandle",
    "Settings",
    "SkipEvent",
    "StorageError",
    "Store",
    "compact",
    "export",
    "import_checkpoint",
    "open_store",
    "prune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
