"""Writes a checkpoint in formats that others read: a torch.save file, safetensors, a DCP directory.

It must not know how a training run restores itself.
"""

from __future__ import annotations

from incremental_ckpt.exporting.export import FORMATS, ExportReport, export

__all__ = ["FORMATS", "ExportReport", "export"]
