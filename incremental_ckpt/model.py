"""The facts that all floors speak of (shards, checkpoints, progress) and the one seam to models.

It must not know how any of them is stored, and must not import torch at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Kind = Literal["base", "delta"]
WEIGHT = "weight"
DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Field:
    """One thing that every row of a shard has: its weight, or one per-row state of its optimizer.

    Attributes:
        name: ``weight``, ``sum``, ``exp_avg``, ...: one name for one meaning, whichever optimizer has it.
        dtype: a key of DTYPE_BYTES.
        width: elements per row.
    """

    name: str
    dtype: str
    width: int

    @property
    def row_bytes(self) -> int:
        return self.width * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Shard:
    """The part of a table that one rank holds: rows x columns, with global offsets.

    Attributes:
        table: the table's fully qualified name in the unsharded module, without ``.weight``.
        table_rows, table_cols: shape of the whole table.
        row_start, rows, col_start, cols: this part of it.
        fields: weight first, then the optimizer's per-row fields in a fixed order.
    """

    table: str
    table_rows: int
    table_cols: int
    row_start: int
    rows: int
    col_start: int
    cols: int
    fields: tuple[Field, ...]

    @property
    def row_bytes(self) -> int:
        return sum(f.row_bytes for f in self.fields)

    @property
    def dtype(self) -> str:
        """Of the weight."""
        return next((f.dtype for f in self.fields if f.name == WEIGHT), "no weight")


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint by number and identity (the manifest's digest, 64 hex digits)."""

    seq: int
    digest: str


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint as users see it. Sizes in bytes; ``rows`` counts the rows carried, ``table_rows`` all
    rows."""

    seq: int
    step: int
    epoch: int | None
    loss: float | None
    metrics: Mapping[str, float]
    kind: Kind
    parent: int | None
    bytes: int
    rows: int
    table_rows: int
    created: datetime
    job: str
    attempt: str
    world_size: int


@dataclass(frozen=True)
class Progress:
    """Where a resumed run stands: the facts given to the save that it resumed from."""

    seq: int
    step: int
    epoch: int | None
    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Table:
    """A shard together with the live tensors that training updates.

    Attributes:
        shard: the facts.
        tensors: for each field name a tensor ``[rows, width]``, a view of live memory on the table's device; a write to
            it changes the model.
        replicated: every rank holds this very shard, all alike (a data-parallel table).
        edited: whether rows were changed just now that nobody has announced (an in-place edit). Safe in any thread.
        tracked: whether every update of a row is announced to the tracker before it happens. False: any row may change
            at any time, and every checkpoint carries all rows.
        whole_because: why it is not tracked, and what would change that, for people; empty where nobody can.
    """

    shard: Shard
    tensors: Mapping[str, torch.Tensor]
    tracked: bool
    replicated: bool = False
    edited: Callable[[], bool] = _never
    whole_because: str = ""


@dataclass(frozen=True)
class Difference:
    """One way in which a model and a checkpoint differ, as a line for people.

    Attributes:
        fatal: nothing of it can be loaded; otherwise one side merely lacks it.
    """

    text: str
    fatal: bool = False


Mark = Callable[[int, "torch.Tensor"], None]
"""``mark(table index, local row ids)``: these rows are about to change. Ids may repeat; int32 or int64, on the "
"table's device."""


class WatchedModel(Protocol):
    """What a save needs of a model: where the rows are, when they change, and all state that is not rows."""

    def tables(self) -> Sequence[Table]:
        """All tables of this rank, always in the same order and number; their tensors may be replaced between calls.

        Cheap enough to be called at every save. A table's optimizer fields may appear later (lazily created state).
        """

    def watch(self, mark: Mark, mark_all: Callable[[int], None]) -> None:
        """Call ``mark`` from now on, in the thread and on the stream of the update, before it changes the rows;
        ``mark_all(table)`` where a change cannot be told by rows (a ``load_state_dict``, an in-place edit)."""

    def unwatch(self) -> None:
        """Remove every hook that watch installed."""

    def begin(self) -> None:
        """The model is now as a resume will find it: from here on no parameters or buffers may come or go."""

    def state(self) -> Mapping[str, Any]:
        """All state that is not rows, as nested containers whose tensors may alias live memory: ``dense`` (parameters
        and buffers by name), ``optimizer`` (without the rows' fields), ``fused`` (counters of fused optimizers), and
        under ``replicated`` the names of the parameters that all ranks hold alike. Raises SaveError in the middle of a
        step (a fused update ran since the dense optimizer's last step)."""


class RestorableModel(Protocol):
    """What a resume needs of a model."""

    def differences(self, fields: Mapping[str, Sequence[Field]], state: Mapping[str, Any]) -> Sequence[Difference]:
        """How the model differs from a checkpoint, but for the names and shapes of its tables. Nothing is changed.

        Args:
            fields: of the checkpoint's tables, by table, as wide as those of the whole table.
            state: what ``state`` gave, on CPU tensors.
        """

    def prepare_restore(self, fields: Mapping[str, Sequence[Field]], state: Mapping[str, Any]) -> Sequence[Table]:
        """Make sure that lazily created per-row state exists, and return ``tables()``. Arguments as for
        ``differences``, which has found nothing fatal."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what ``state`` gave, as far as the model has it; rows are prepared and restored."""


class ModelAdapter(WatchedModel, RestorableModel, Protocol):
    """The one seam to models."""
