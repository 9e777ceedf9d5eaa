"""The committed checkpoints of one store: open, list, chain, commit, read, check.

It must not know models, ranks or threads, and must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from incremental_ckpt.repository.chain import Link
    from incremental_ckpt.repository.check import CheckReport, Problem
    from incremental_ckpt.repository.core import Repository
    from incremental_ckpt.repository.listing import Listing

__all__ = ["CheckReport", "Link", "Listing", "Problem", "Repository"]

_HOMES = {"CheckReport": "check", "Problem": "check", "Link": "chain", "Repository": "core", "Listing": "listing"}


def __getattr__(name: str) -> Any:
    """Loaded when first used: a listing needs no arrays, and loading them takes longer than it does."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
