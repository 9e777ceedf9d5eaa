"""A checkpoint as one file that torch.load reads with ``weights_only=True``.

It must not know where the tensors come from.
"""

from __future__ import annotations

import errno
import pickle
from pathlib import Path
from typing import Any

import torch

from incremental_ckpt.errors import MismatchError
from incremental_ckpt.exporting.content import Content, Rows


def write(content: Content, out: Path) -> None:
    """
    Raises:
        MismatchError: the model has extra state that torch.load refuses without pickle.
        OSError: the file cannot be written.
    """
    model = {**{name: rows.read_all() for name, rows in content.tables.items()}, **content.dense}
    whole: dict[str, Any] = model
    if content.optimizer is not None:
        whole = {"model": model, "optimizer": _read(content.optimizer)}
    try:
        torch.save(whole, out)
    except RuntimeError as error:  # torch's writer does not say what the system said
        raise incomplete(error) from error
    del model, whole
    try:
        torch.load(out, weights_only=True, mmap=True, map_location="cpu")
    except UnicodeEncodeError as error:
        text = "a folder's name is not UTF-8, and torch would not load from it: give another place or format"
        raise OSError(errno.EILSEQ, text) from error
    except pickle.UnpicklingError as error:
        raise MismatchError(
            f"a torch file of this checkpoint could be loaded with pickle only ({error}). Export as 'safetensors', "
            "which keeps what is not a tensor apart"
        ) from error


def incomplete(error: RuntimeError) -> OSError:
    """What torch's writer means where it cannot write on."""
    return OSError(errno.EIO, f"torch could not write all of it ({error}). Is the disk full?")


def _read(value: Any) -> Any:
    if isinstance(value, Rows):
        return value.read_all()
    if isinstance(value, dict):
        return {name: _read(member) for name, member in value.items()}
    return value
