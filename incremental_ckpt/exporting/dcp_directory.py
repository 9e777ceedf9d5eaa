"""A checkpoint as a directory of torch.distributed.checkpoint, its tables in chunks of rows that any sharding can read.

It must not know where the tensors come from.
"""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from incremental_ckpt.exporting.content import Content, Rows
from incremental_ckpt.exporting.torch_file import incomplete


def write(content: Content, out: Path) -> None:
    rows: dict[str, Rows] = {}

    def stand_in(value: Any, name: str) -> Any:
        """The tree with tensors of no memory in the place of rows."""
        if isinstance(value, Rows):
            rows[name] = value
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, Mapping):
            return {key: stand_in(member, f"{name}.{key}" if name else str(key)) for key, member in value.items()}
        return value

    model = {**content.tables, **content.dense}
    whole = model if content.optimizer is None else {"model": model, "optimizer": dict(content.optimizer)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process.*")
        writer = FileSystemWriter(out, overwrite=False)
        try:
            save(stand_in(whole, ""), storage_writer=writer, planner=_Planner(rows), no_dist=True)
        except CheckpointException as error:
            cause = next(cause for cause, _ in error.failures.values())
            raise (incomplete(cause) if isinstance(cause, RuntimeError) else cause) from None


class _Planner(DefaultSavePlanner):
    """Plans rows as shards, and reads each when it is written.

    Args:
        rows: by the flat names of the state dict.
    """

    def __init__(self, rows: Mapping[str, Rows]) -> None:
        super().__init__()
        self._rows = rows

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            items += self._shards(item.index.fqn) if item.index.fqn in self._rows else [item]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        rows = self._rows.get(write_item.index.fqn)
        if rows is None:
            found: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
            return found
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return rows.read(range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]))

    def _shards(self, name: str) -> list[WriteItem]:
        rows = self._rows[name]
        size = torch.Size(rows.shape)
        properties = TensorProperties(dtype=rows.dtype)
        shards = []
        for chunk in rows.chunks() or [range(0)]:
            offsets, sizes = torch.Size([chunk.start, 0]), torch.Size([len(chunk), rows.field.width])
            data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, size)
            shards.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        return shards
