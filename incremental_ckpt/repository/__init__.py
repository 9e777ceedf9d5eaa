"""The committed checkpoints of one store: open, list, chain, commit, read, check.

It must not know models, ranks or threads, and must not import torch.
"""

from __future__ import annotations

from incremental_ckpt.repository.check import CheckReport, Problem
from incremental_ckpt.repository.core import Link, Listing, Repository

__all__ = ["CheckReport", "Link", "Listing", "Problem", "Repository"]
