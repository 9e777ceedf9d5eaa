"""A checkpoint as a folder of safetensors files, with Hugging Face's index where there are several.

It must not know where the tensors come from. It needs no safetensors library.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from incremental_ckpt.errors import MismatchError
from incremental_ckpt.exporting.content import Content, Rows
from incremental_ckpt.format.pack import CODES
from incremental_ckpt.format.tree import to_tree

MAX_FILE_BYTES = 5 * 10**9
"""A larger model is written in several files."""

_ALIGNMENT = 64


def write(content: Content, out: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Raises MismatchError for a dtype that safetensors lacks."""
    out.mkdir()
    tensors: dict[str, Any] = dict(content.tables)
    extra: dict[str, Any] = {}
    for name, value in content.dense.items():
        (tensors if isinstance(value, torch.Tensor) else extra)[name] = value
    _write_model(tensors, sorted({rows.table for rows in content.tables.values()}), out, max_file_bytes)
    if content.optimizer is not None or extra:
        _write_optimizer(content.optimizer or {}, extra, out)


def _write_model(tensors: Mapping[str, Any], tables: Sequence[str], out: Path, max_file_bytes: int) -> None:
    files: list[dict[str, Any]] = [{}]
    used = 0
    for name, value in tensors.items():
        if files[-1] and used + value.nbytes > max_file_bytes:
            files.append({})
            used = 0
        files[-1][name] = value
        used += value.nbytes
    metadata = {"format": "pt", "tables": json.dumps(list(tables))}
    if len(files) == 1:
        write_file(out / "model.safetensors", files[0], metadata)
        return
    places: dict[str, str] = {}
    for number, members in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_file(out / name, members, metadata)
        places |= dict.fromkeys(members, name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_optimizer(optimizer: Mapping[str, Any], extra: Mapping[str, Any], out: Path) -> None:
    """What is not the model's tensors: rows by ``<table>.<field>``, the rest as a tree (docs/format.md, section 8)
    whose tensors are ``state.<index>``."""
    rows = {f"{table}.{f}": r for table, fields in optimizer.get("rows", {}).items() for f, r in fields.items()}
    rest = {"dense": optimizer.get("dense", {}), "fused": optimizer.get("fused", []), "extra": dict(extra)}
    tree, leaves = to_tree(rest, path="optimizer", as_tensor=lambda v: v if isinstance(v, torch.Tensor) else None)
    tensors = {f"state.{index}": _as_tensor(leaf) for index, leaf in enumerate(leaves)}
    write_file(out / "optimizer.safetensors", {**rows, **tensors}, {"format": "pt"})
    document = {"tables": optimizer.get("tables", []), "tree": tree}
    (out / "optimizer.json").write_text(json.dumps(document, allow_nan=False) + "\n")


def _as_tensor(leaf: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(leaf)) if isinstance(leaf, np.ndarray) else leaf


def write_file(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """A safetensors file of tensors and Rows, written chunk by chunk."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in CODES:
            raise MismatchError(f"{name} is of dtype {dtype}, which safetensors lacks. Export as 'torch' or 'dcp'")
        header[name] = {"dtype": CODES[dtype], "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for value in tensors.values():
            for chunk in _chunks(value):
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _chunks(value: torch.Tensor | Rows) -> Iterator[memoryview]:
    if isinstance(value, Rows):
        for rows in value.chunks():
            yield value.read(rows).reshape(-1).view(torch.uint8).numpy().data
    elif value.numel():
        yield value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
