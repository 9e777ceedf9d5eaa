"""Turns a chain into an equivalent base, by moving records as they are: nothing is decoded, nothing rounded again.

It must not know models, ranks or threads of training, and must not import torch.
"""

from __future__ import annotations

from incremental_ckpt.compaction.compactor import MEMORY, CompactReport, compact

__all__ = ["MEMORY", "CompactReport", "compact"]
