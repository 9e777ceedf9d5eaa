"""Models that something else saved: torch files, safetensors, DCP directories, read without pickle.

It must not know repositories or checkpoints.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from incremental_ckpt.errors import FormatError, NotFoundError, StorageError
from incremental_ckpt.format.pack import read_header
from incremental_ckpt.format.tree import from_tree
from incremental_ckpt.snapshot import torch_value

_MODEL_KEYS = ("model", "state_dict", "model_state_dict")
_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Foreign:
    """A saved model.

    Attributes:
        names: of the model's tensors.
        load: a tensor of the model by name; mapped from the file where that is possible.
        extra: what the model has that are no tensors.
        tables: which of its modules are tables, where the file says so.
        optimizer: ``tables``, ``rows``, ``dense`` and ``fused`` as an export writes them, or None.
    """

    place: Path
    names: tuple[str, ...]
    load: Callable[[str], torch.Tensor]
    extra: Mapping[str, Any] = field(default_factory=dict)
    tables: frozenset[str] | None = None
    optimizer: Mapping[str, Any] | None = None


def read_foreign(place: Path) -> Foreign:
    """What is at a place, whichever of the formats it is in.

    Raises:
        NotFoundError: nothing is.
        FormatError: none of them, or it would need pickle.
        CorruptionError: a safetensors file is damaged.
        StorageError: it may not be read.
    """
    try:
        return _read(place)
    except PermissionError as error:
        raise StorageError(f"cannot read {error.filename or place}: {error.strerror}. Check its permissions") from error


def _read(place: Path) -> Foreign:
    if not place.exists():
        raise NotFoundError(f"{place} does not exist")
    if place.is_file():
        return _safetensors(place, [place]) if place.suffix == ".safetensors" else _torch_file(place)
    if (place / ".metadata").exists():
        return _dcp(place)
    if (place / _INDEX).exists():
        return _safetensors(place, [_inside(place, name) for name in _indexed(place / _INDEX)])
    found = sorted(f for f in place.glob("*.safetensors") if f.name != "optimizer.safetensors")
    if found:
        return _safetensors(place, found)
    raise FormatError(f"{place} is neither a DCP directory (it has no .metadata) nor a folder of safetensors files")


def _indexed(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{index} is no index of safetensors files: it has no weight_map ({error})") from error


def _inside(place: Path, name: str) -> Path:
    if Path(name).name != name:
        raise FormatError(f"{place / _INDEX} names {name!r}, which is no file beside it")
    return place / name


def _torch_file(place: Path) -> Foreign:
    try:
        whole = _torch_load(place)
    except pickle.UnpicklingError as error:
        raise _refusal(place, error) from error
    except PermissionError:
        raise
    except Exception as error:  # what torch raises of bytes that it did not write is not bounded
        raise FormatError(f"{place} is no file of torch.save: {error}") from error
    if not isinstance(whole, Mapping):
        raise FormatError(f"{place} holds a {type(whole).__name__}, not a state_dict()")
    model, optimizer = _split(whole)
    return _of_state_dict(place, model, optimizer)


def _torch_load(place: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickles that it then refuses
        try:
            return torch.load(place, weights_only=True, mmap=True, map_location="cpu")
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            return torch.load(place, weights_only=True, map_location="cpu")


def _split(whole: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """The model's state dict, and the optimizer's part if it is one of an export."""
    for key in _MODEL_KEYS:
        if isinstance(whole.get(key), Mapping):
            optimizer = whole.get("optimizer")
            ours = isinstance(optimizer, Mapping) and optimizer.keys() == {"tables", "rows", "dense", "fused"}
            return whole[key], optimizer if ours else None
    return whole, None


def _of_state_dict(place: Path, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> Foreign:
    tensors = {str(name): value for name, value in model.items() if isinstance(value, torch.Tensor)}
    extra = {str(name): value for name, value in model.items() if not isinstance(value, torch.Tensor)}
    tables = frozenset(optimizer["tables"]) if optimizer is not None else None
    return Foreign(place, tuple(tensors), tensors.__getitem__, extra, tables, optimizer)


def _safetensors(place: Path, files: Iterable[Path]) -> Foreign:
    tensors: dict[str, torch.Tensor] = {}
    tables: frozenset[str] | None = None
    for file in files:
        found, metadata = map_file(file)
        tensors |= found
        if "tables" in metadata:
            tables = frozenset(json.loads(metadata["tables"])) | (tables or frozenset())
    folder = place if place.is_dir() else place.parent
    extra: Mapping[str, Any] = {}
    optimizer: Mapping[str, Any] | None = None
    document = folder / "optimizer.json"
    if tables is not None and document.exists():
        rest = json.loads(document.read_text())
        state, _ = map_file(folder / "optimizer.safetensors")
        count = sum(name.startswith("state.") and name[6:].isdigit() for name in state)
        leaves = [state[f"state.{index}"] for index in range(count)]
        tree: Any = from_tree(rest["tree"], leaves, key=str(document), make=torch_value)
        extra = tree.pop("extra")
        rows: dict[str, dict[str, torch.Tensor]] = {table: {} for table in rest["tables"]}
        for name, tensor in state.items():
            table, _, field_name = name.rpartition(".")
            if table in rows:
                rows[table][field_name] = tensor
        optimizer = {**tree, "rows": rows} if rows or tree["dense"] or tree["fused"] else None  # else: extra state only
    return Foreign(place, tuple(tensors), tensors.__getitem__, extra, tables, optimizer)


def map_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors file, mapped into memory, and its metadata.

    Raises:
        CorruptionError: it is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(_LENGTH_BYTES)
        header = length + file.read(min(int.from_bytes(length, "little"), size))
    found = read_header(header, str(path), size)
    metadata: dict[str, str] = json.loads(header[_LENGTH_BYTES:]).get("__metadata__", {})
    # Private pages, so that torch may take them for its own; nobody writes to them.
    memory = torch.from_numpy(np.memmap(path, np.uint8, "c")) if size else torch.empty(0, dtype=torch.uint8)
    tensors = {}
    for name, (dtype, shape, begin, end) in found.items():
        wanted = getattr(torch, dtype)
        part = memory[begin:end]
        if begin % wanted.itemsize:
            part = part.clone()
        tensors[name] = part.view(wanted).view(shape) if end > begin else torch.empty(shape, dtype=wanted)
    return tensors, metadata


def _dcp(place: Path) -> Foreign:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import ReadItem
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Metadata:
            with (place / ".metadata").open("rb") as file:
                found: Metadata = _MetadataUnpickler(file).load()
            found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    class WithoutPickle(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def read(wanted: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
            planner = WithoutPickle(flatten_state_dict=False)
            try:
                load(wanted, storage_reader=Reader(place), planner=planner, no_dist=True)
            except CheckpointException as error:
                raise _refusal(place, next(cause for cause, _ in error.failures.values())) from error

    def tensor(key: str) -> torch.Tensor:
        stored: Any = entries[key]
        found = torch.empty(stored.size, dtype=stored.properties.dtype)
        read({key: found})
        return found

    values: dict[str, Any] = {}
    try:
        metadata = Reader(place).read_metadata()
    except Exception as error:  # damaged pickles raise anything
        raise _refusal(place, error) from error
    entries = metadata.state_dict_metadata
    paths: dict[str, tuple[Any, ...]] = {key: (key,) for key in entries}
    paths |= {key: tuple(path) for key, path in (metadata.planner_data or {}).items() if key in entries}
    root = next((r for r in _MODEL_KEYS if any(len(p) > 1 and p[0] == r for p in paths.values())), None)
    ours = root == "model" and any(p == ("optimizer", "tables") for p in paths.values())
    model = {key: key if root is None else key[len(root) + 1 :] for key in entries if root in (None, paths[key][0])}
    is_tensor = {key for key, stored in entries.items() if isinstance(stored, TensorStorageMetadata)}
    wanted = {key for key in entries if key not in is_tensor and (key in model or ours)}
    read(dict.fromkeys(wanted, b""))
    by_name = {name: key for key, name in model.items() if key in is_tensor}
    extra = {name: values[key] for key, name in model.items() if key not in is_tensor}
    optimizer = _nested(paths, ours, lambda key: tensor(key) if key in is_tensor else values[key])
    tables = frozenset(optimizer["tables"]) if optimizer is not None else None
    return Foreign(place, tuple(by_name), lambda name: tensor(by_name[name]), extra, tables, optimizer)


class _MetadataUnpickler(pickle.Unpickler):
    """DCP pickles what is where. Only the classes of which that consists are let through."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _NAMES = frozenset({
        ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib", "WindowsPath"),
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        # Dataclasses and enums only: facts without behaviour.
        found = super().find_class(module, name) if module in self._MODULES and "." not in name else None
        if isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not what DCP's metadata consist of")


def _refusal(place: Path, error: BaseException) -> FormatError:
    if isinstance(error, pickle.UnpicklingError):
        paragraphs = [part.strip() for part in str(error).split("\n\n") if part.strip()]
        reason = paragraphs[min(1, len(paragraphs) - 1)].partition("\n")[0].rstrip(".")  # torch's first one is advice
        return FormatError(
            f"{place} cannot be read without pickle ({reason}). If it is a saved model, save its tensors alone, where "
            "you trust it"
        )
    return FormatError(f"{place} cannot be read: {error}")


def _nested(paths: Mapping[str, tuple[Any, ...]], ours: bool, value: Callable[[str], Any]) -> Mapping[str, Any] | None:
    """The optimizer's part of an export, as it was before DCP took it apart."""
    if not ours:
        return None
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    wanted = {key: path[1:] for key, path in paths.items() if path[0] == "optimizer"}
    found: dict[str, Any] = {"rows": {}, "dense": {}, "fused": []}
    found |= unflatten_state_dict({key: value(key) for key in wanted}, wanted)
    for each in found["dense"].values():
        if "param_groups" in each:  # DCP keeps no empty dicts
            each |= {name: each.get(name, {}) for name in ("state", "rows", "others")}
    return found
