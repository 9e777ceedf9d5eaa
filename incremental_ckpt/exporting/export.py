"""One export: gathers what a checkpoint holds and has it written, whole or not at all.

It must not know the formats themselves.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from incremental_ckpt.arguments import REPOSITORY, Progress, an, flag, path, progress_function, whole
from incremental_ckpt.errors import CorruptionError, StorageError
from incremental_ckpt.exporting.beside import WRITTEN, hidden_folder, publish, sweep
from incremental_ckpt.exporting.content import Content, gather
from incremental_ckpt.repository import Link, Repository

Format = Literal["torch", "safetensors", "dcp"]
FORMATS: tuple[str, ...] = get_args(Format)

_WRITERS = {"torch": "torch_file", "safetensors": "safetensors_files", "dcp": "dcp_directory"}


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Attributes:
        tables, tensors: how many tables, and other tensors of the model.
        optimizer: whether the state of optimizers is there too.
        bytes: size of the files.
    """

    seq: int
    step: int
    format: str
    tables: int
    tensors: int
    optimizer: bool
    bytes: int


def export(
    repository: Repository,
    out: str | os.PathLike[str],
    format: Format = "torch",
    seq: int | None = None,
    *,
    optimizer: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the model of a checkpoint (None: the newest), by the names of the unsharded module's ``state_dict()``.

    - ``torch``: a file for ``torch.load(out, weights_only=True)``. All of the model is held in memory.
    - ``safetensors``: a folder with ``model.safetensors``, or several files and Hugging Face's index.
    - ``dcp``: a folder for ``torch.distributed.checkpoint.load``, whatever the sharding there.

    Args:
        out: must not exist yet.
        optimizer: also the optimizers' state: ``torch`` and ``dcp`` then hold ``{"model": ..., "optimizer": ...}``,
            safetensors a further ``optimizer.safetensors`` with ``optimizer.json``.
        progress: called with the bytes of rows read and of all rows, decoded; anew from the start where something that
            was read turns out to be damaged or gone, and there is another way to read it.

    Raises:
        NotFoundError: no such checkpoint.
        CorruptionError: something of it is damaged; an equivalent base is passed over for the chain that it stands for.
        StorageError: ``out`` exists, if only by the time that it is written, or cannot be written.
        ValueError, TypeError: no such format, or an argument is not what it should be.
    """
    an(Repository, "repository", repository, REPOSITORY)
    place = path("out", out)
    flag("optimizer", optimizer)
    progress = progress_function(progress)
    if format not in _WRITERS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    sweep(place)
    if os.path.lexists(place):
        raise _exists(place)
    wanted = repository.resolve(None if seq is None else whole("seq", seq))
    write = importlib.import_module(f"incremental_ckpt.exporting.{_WRITERS[format]}").write

    def gather_and_write(links: Sequence[Link]) -> tuple[Content, int]:
        content = gather(repository, links, optimizer=optimizer, progress=progress)
        return content, _write_whole(content, place, write)

    try:
        content, nbytes = repository.read_along(gather_and_write, wanted)
    except CorruptionError:
        repository.resolve(wanted)  # a prune may have passed: then it is not damaged, but gone
        raise
    return ExportReport(
        wanted, content.step, format, len(content.tables), len(content.dense), content.optimizer is not None, nbytes
    )


def _write_whole(content: Content, place: Path, write: Callable[[Content, Path], None]) -> int:
    """Write beside, and give it its name at the end, unless something has that by then."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with hidden_folder(place) as folder:
            written = folder / WRITTEN
            write(content, written)
            size = sum(f.stat().st_size for f in (written, *written.rglob("*")) if f.is_file())
            if not publish(folder, place):
                raise _exists(place)
    except OSError as error:
        full = (
            " Free space, or choose another place." if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        )
        raise StorageError(f"cannot write {place}: {error.strerror or error}.{full} Nothing is left of it") from error
    return size


def _exists(place: Path) -> StorageError:
    return StorageError(f"{place} exists, and nothing is ever overwritten: nothing was touched. Give another name")
