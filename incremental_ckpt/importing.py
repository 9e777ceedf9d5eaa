"""Takes a model that something else saved as the first checkpoint of an empty store: what ``export`` writes, and plain
state dicts in the same formats.

It must not know models: which tensors are tables it is told, or tells by their names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

import torch

from incremental_ckpt.arguments import REPOSITORY, Progress, an, path, progress_function, whole
from incremental_ckpt.codecs import codec_named
from incremental_ckpt.errors import ConflictError, MismatchError
from incremental_ckpt.foreign import Foreign, read_foreign
from incremental_ckpt.format.layout import new_id
from incremental_ckpt.format.manifest import Lineage, Manifest, Totals
from incremental_ckpt.model import WEIGHT, CheckpointInfo, Field, Shard, Table
from incremental_ckpt.rank_writer import Attempt, RankWriter
from incremental_ckpt.repository import Repository
from incremental_ckpt.snapshot import HostArena, Part, dtype_name, flatten_state, rows_per_entry

MIB = 1 << 20
_PACK_BYTES, _ENTRY_BYTES = 32 * MIB, 8 * MIB
_TORCHREC_TABLE = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.[^.]+$")
_SUFFIX = f".{WEIGHT}"


@dataclass(frozen=True)
class ImportReport:
    """What was imported.

    Attributes:
        tables: names of the tensors that became tables.
        tensors: how many others the model has.
        optimizer: whether the state of optimizers came too; else a resume needs ``strict=False``.
    """

    checkpoint: CheckpointInfo
    tables: tuple[str, ...]
    tensors: int
    optimizer: bool


def import_checkpoint(
    source: str | os.PathLike[str],
    repository: Repository,
    *,
    tables: Sequence[str] | None = None,
    step: int = 0,
    progress: Progress | None = None,
) -> ImportReport:
    """Commit the model in a torch file, a safetensors file or folder, or a DCP directory as the store's first base.

    Nothing is unpickled beyond what ``torch.load(weights_only=True)`` allows.

    Args:
        tables: names of tables (their tensors' names without ``.weight``), ``*`` and ``?`` as in a shell. None: those
            that an export names; else the children of ``embedding_bags`` and ``embeddings``, as TorchRec names them.
            Empty: none.
        step: of the training, at which it was saved.
        progress: called with the bytes of rows and state that are written, and of all of them.

    Raises:
        NotFoundError: there is no such file.
        FormatError: it is in none of these formats, or would need pickle.
        ConflictError: the store holds checkpoints already.
        MismatchError: what is named as a table is none, or nobody tells which are.
    """
    source = path("source", source)
    an(Repository, "repository", repository, REPOSITORY)
    if (
        isinstance(tables, str | bytes)
        or not isinstance(tables, Sequence | None)
        or not all(isinstance(name, str) for name in tables or ())
    ):
        raise TypeError(f"tables takes a list of names, not {tables!r}")
    step = whole("step", step)
    progress = progress_function(progress)
    if repository.listing().seqs:
        raise ConflictError(
            f"{repository.store.url} holds checkpoints already. An import begins a run: give an empty place"
        )
    foreign = read_foreign(source)
    chosen = _tables(foreign, tables)
    live = [_table(foreign, name) for name in chosen]
    dense = {name: foreign.load(name) for name in foreign.names if name.removesuffix(_SUFFIX) not in chosen}
    optimizer = foreign.optimizer
    state = {
        "dense": {**dense, **foreign.extra},
        "optimizer": optimizer.get("dense", {}) if optimizer is not None else {},
        "fused": optimizer.get("fused", []) if optimizer is not None else [],
    }
    manifest = _commit(repository, live, state, step, progress)
    return ImportReport(manifest.info(), tuple(chosen), len(dense), optimizer is not None)


def _tables(foreign: Foreign, patterns: Sequence[str] | None) -> list[str]:
    names = [name.removesuffix(_SUFFIX) for name in foreign.names if name.endswith(_SUFFIX)]
    if patterns is not None:
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = ", ".join(names[:10]) or "none"
                raise MismatchError(f"no table {pattern!r} in {foreign.place}; tensors that could be one: {near}")
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if foreign.tables is not None:
        return [name for name in names if name in foreign.tables]
    found = [name for name in names if _TORCHREC_TABLE.search(name)]
    if not found:
        raise MismatchError(
            f"{foreign.place} does not say which of its tensors are tables, and none has such a name: name them "
            f"(tables=, --table), or say that there is none (tables=[], --no-tables). Tensors that could be one: "
            f"{', '.join(names[:10]) or 'none'}"
        )
    return found


def _table(foreign: Foreign, name: str) -> Table:
    tensors = {WEIGHT: foreign.load(name + _SUFFIX)}
    if foreign.optimizer is not None:
        tensors |= foreign.optimizer.get("rows", {}).get(name, {})
    rows = tensors[WEIGHT].shape[0] if tensors[WEIGHT].dim() else 0
    for field, tensor in tensors.items():
        if tensor.dim() != 2 or tensor.shape[0] != rows:
            raise MismatchError(
                f"{name}.{field} in {foreign.place} has the shape {list(tensor.shape)}: a table has rows and columns, "
                "and its optimizer's state as many rows"
            )
    cols = tensors[WEIGHT].shape[1]
    fields = tuple(Field(field, dtype_name(tensor.dtype), tensor.shape[1]) for field, tensor in tensors.items())
    return Table(Shard(name, rows, cols, 0, rows, 0, cols, fields), tensors, tracked=False)


def _commit(
    repository: Repository, tables: Sequence[Table], state: Mapping[str, Any], step: int, progress: Progress | None
) -> Manifest:
    repository.create()
    job, seq = new_id(), 1
    attempt = Attempt(
        seq=seq, attempt=new_id(), kind="base", parent=None, next_parent=None, step=step, epoch=None, loss=None,
        metrics={}, job=job, lineage=(Lineage(job, seq, 0),), environment={},
    )  # fmt: skip
    raw = codec_named("raw")
    writer = RankWriter(repository, attempt, tables, {WEIGHT: raw, "optimizer": raw}, rank=0, world_size=1)
    flat, arena = flatten_state(state), HostArena(pinned=False)
    done, total = 0, flat.arena_bytes + sum(table.shard.rows * table.shard.row_bytes for table in tables)
    for packful in _packfuls(tables):
        writer.add_rows(packful)
        done += sum(part.nbytes for part in packful)
        if progress is not None:
            progress(done, total)
    arena.reserve(flat.arena_bytes)
    ballot = writer.vote(writer.add_state(flat.copy(arena), _PACK_BYTES))
    if progress is not None:
        progress(total, total)
    return repository.commit(
        Manifest(
            seq=seq, step=step, epoch=None, loss=None, metrics={}, kind="base", parent=None, next_parent=None,
            job=job, attempt=attempt.attempt, lineage=tuple(attempt.lineage), created=datetime.now(UTC), world_size=1,
            ranks=(ballot.ref,), totals=Totals(ballot.rows, ballot.table_rows, ballot.bytes), environment={},
        )
    )  # fmt: skip


def _packfuls(tables: Sequence[Table]) -> Iterator[list[Part]]:
    packful, size = list[Part](), 0
    for index, table in enumerate(tables):
        fields = table.shard.fields
        step = rows_per_entry([field.row_bytes for field in fields], _ENTRY_BYTES)
        for begin in range(0, table.shard.rows, step):
            rows = range(begin, min(begin + step, table.shard.rows))
            part = Part(index, rows, tuple(_bytes(table.tensors[f.name][rows.start : rows.stop]) for f in fields))
            if packful and size + part.nbytes > _PACK_BYTES:
                yield packful
                packful, size = [], 0
            packful.append(part)
            size += part.nbytes
    if packful:
        yield packful


def _bytes(rows: torch.Tensor) -> Any:
    return rows.contiguous().view(torch.uint8).numpy().reshape(len(rows), -1)
