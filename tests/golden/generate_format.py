"""Writes the golden files of format version 1 below ``v1/format``; run it only for a new version of the format.

    python tests/golden/generate_format.py [FOLDER]

Everything is built by ``incremental_ckpt.format`` alone from the facts in this file, which the test of the golden files
imports too. It must not know stores: a key becomes a path.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import (
    Entry,
    Gone,
    Lineage,
    Manifest,
    Outcome,
    RankManifest,
    RankRef,
    RepoFile,
    Resume,
    RowSet,
    ShardEntries,
    State,
    StateTensor,
    Totals,
)
from incremental_ckpt.format.pack import FinishedPack, PackBuilder
from incremental_ckpt.format.rowset import encode_rows
from incremental_ckpt.format.sealed import digest_of
from incremental_ckpt.format.tree import HostTensor, to_tree
from incremental_ckpt.model import CheckpointRef, Field, Kind, Shard

GOLDEN = Path(__file__).parent / "v1" / "format"

FIRST_JOB, SECOND_JOB = "00000000000000a1", "00000000000000a2"
ATTEMPTS = {1: "00000000000000b1", 2: "00000000000000b2", 3: "00000000000000b3"}
COMPACTION, FAILED = "00000000000000c2", "00000000000000f3"
DAY = [datetime(2026, 1, day, 12, 30, 15, 250, tzinfo=UTC) for day in range(1, 10)]

Rows = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]

# A table of 6 rows and 4 columns in two column shards on two ranks. At seq 1 a value is its row number; seq 2 adds 100
# in rows 1 and 4, seq 3 adds 1000 to the row number in rows 4 and 5. `sum`, the optimizer's field, is minus the weight.
TABLE_ROWS, TABLE_COLS, COLS = 6, 4, 2
CHANGED: Mapping[int, tuple[int, ...]] = {1: tuple(range(TABLE_ROWS)), 2: (1, 4), 3: (4, 5)}
OFFSETS = {1: 0, 2: 100, 3: 1000}
ROW_SETS: Mapping[str, Rows] = {
    "none": np.arange(0, dtype=np.int64),
    "array": np.array([0, 1, 5, 70_000, 70_002, 1_000_000], dtype=np.int64),
    "bitmap": np.arange(0, 20_000, 3, dtype=np.int64),
    "run": np.arange(50_000, 200_000, dtype=np.int64),
    "mixed": np.concatenate([np.arange(4_000), np.arange(65_536, 130_000, 7), [10**6, 2 * 10**6, 3 * 10**6]]),
    "buckets": np.array([7, 2**32 - 1, 2**32, 2**33 + 9, 2**40 + 1], dtype=np.int64),
}


def _torchs(name: str, text: str) -> object:
    """An object that says of itself that it is torch's: trees recognize these without importing torch."""
    return type(name, (), {"__module__": "torch", "__repr__": lambda _: text})()


SIZE: Any = type("Size", (tuple,), {"__module__": "torch"})((2, 3))
TIED = HostTensor("float32", (2,), memoryview(np.array([0.5, -0.5], dtype="<f4").tobytes()))
HALF = HostTensor("bfloat16", (2, 1), memoryview(bytes.fromhex("803f00c0")))
COMPLEX = HostTensor("complex64", (1,), memoryview(np.array([1 + 2j], dtype="<c8").tobytes()))
EMPTY = HostTensor("bool", (0, 3), memoryview(b""))
ARRAY = np.arange(6, dtype="<i2").reshape(2, 3)
EVERY_KIND: Mapping[str, Any] = {
    "none": None,
    "bools": [True, False],
    "text": 'ä "quoted" \\ [brackets] \n \U0001f600',
    "int": -7,
    "large ints": [2**53, 2**53 + 1, -(2**64)],
    "floats": [0.1, -0.0, 1e308, 5e-324, 3.0],
    "special floats": [math.nan, math.inf, -math.inf],
    "complex": complex(1.5, -math.inf),
    "bytes": b"\x00\xffpickle",
    "tuple": (1, (2, [3])),
    "set": {"b", "a"},
    "frozenset": frozenset({3, 1, 2}),
    "dict": {"b": 1, "a": {}},
    "int keys": {0: "zero", -1: "minus one"},
    "odd keys": {None: 1, (1, 2): 2, 1.5: 3, "$int": 4},
    "ordered": OrderedDict([("z", 1), ("a", 2)]),
    "tensor": TIED,
    "tied": [TIED],
    "bfloat16": HALF,
    "complex tensor": COMPLEX,
    "empty tensor": EMPTY,
    "array": ARRAY,
    "scalar": np.float64(2.5),
    "size": SIZE,
    "dtype": _torchs("dtype", "torch.bfloat16"),
    "device": _torchs("device", "cuda:0"),
}


def table(seq: int) -> Values:
    """The whole table at ``seq``, ``[TABLE_ROWS, TABLE_COLS]``."""
    values = np.empty((TABLE_ROWS, TABLE_COLS), dtype="<f4")
    for link in range(1, seq + 1):
        for row in CHANGED[link]:
            values[row] = row + OFFSETS[link]
    return values


def objects() -> dict[str, bytes]:
    """The golden repository: every object by its key."""
    made: dict[str, bytes] = {layout.REPO: RepoFile(1, ()).to_bytes()}
    parent: CheckpointRef | None = None
    for seq in (1, 2, 3):
        ranks = [_write_rank(made, seq, rank) for rank in range(2)]
        lineage = (Lineage(FIRST_JOB, 1, 0),) + ((Lineage(SECOND_JOB, 3, 2),) if seq == 3 else ())
        manifest = _manifest(seq, "base" if seq == 1 else "delta", parent, lineage, ranks)
        _add(made, manifest)
        parent = CheckpointRef(seq, digest_of(made[manifest.key]))
        _add(made, Outcome(seq, ATTEMPTS[seq], True, ""))
    of = digest_of(made[layout.manifest_key(2)])
    compacted = [_write_rank(made, 2, rank, COMPACTION, of) for rank in range(2)]
    _add(made, _manifest(2, "base", None, (Lineage(FIRST_JOB, 1, 0),), compacted, COMPACTION, of))
    _add(made, Gone(1, DAY[4]))
    _add(made, Resume(SECOND_JOB, 1, 2, 2, DAY[3]))
    error = "rank 1: OSError: No space left on device"
    _add(made, RankManifest(3, FAILED, 1, 2, "failed", error, (), (), ()))
    _add(made, Outcome(3, FAILED, False, error))
    return made


def row_sets() -> dict[str, bytes]:
    return {f"{name}.roaring": encode_rows(rows) for name, rows in ROW_SETS.items()}


def _add(made: dict[str, bytes], document: Manifest | RankManifest | Outcome | Gone | Resume) -> None:
    made[document.key] = document.to_bytes()


def _manifest(
    seq: int,
    kind: Kind,
    parent: CheckpointRef | None,
    lineage: tuple[Lineage, ...],
    ranks: list[tuple[RankRef, int]],
    attempt: str = "",
    of: str | None = None,
) -> Manifest:
    rows = TABLE_ROWS if kind == "base" else len(CHANGED[seq])
    return Manifest(
        seq=seq,
        step=seq * 1000,
        epoch=None if seq == 1 else 0,
        loss=math.nan if seq == 3 else 0.5 / seq,
        metrics={"auc": 0.75, "spikes": math.inf} if seq == 3 else {},
        kind=kind,
        parent=parent,
        next_parent=parent if seq == 3 else None,
        job=lineage[-1].job,
        attempt=attempt or ATTEMPTS[seq],
        lineage=lineage,
        created=DAY[seq],
        world_size=2,
        ranks=tuple(ref for ref, _ in ranks),
        totals=Totals(rows, TABLE_ROWS, sum(size for _, size in ranks)),
        environment={"torch": "2.13.0", "threads": 2},
        of=of,
    )


def _write_rank(made: dict[str, bytes], seq: int, rank: int, attempt: str = "", of: str = "") -> tuple[RankRef, int]:
    """Add a rank's packs and rank manifest; return its reference and the bytes of all of these."""
    attempt = attempt or ATTEMPTS[seq]
    finished, part = _table_pack(seq, rank, layout.pack_key(seq, attempt, rank, 0), whole=seq == 1 or bool(of))
    packs = [finished]
    state: tuple[State, ...] = ()
    if rank == 0 and not of:
        state_pack, state = _state_pack(layout.pack_key(seq, attempt, rank, 1))
        packs.append(state_pack)
    for each in packs:
        made[each.pack.key] = b"".join(each.parts)
    manifest = RankManifest(seq, attempt, rank, 2, "ok", "", tuple(each.pack for each in packs), (part,), state)
    _add(made, manifest)
    raw = made[manifest.key]
    return RankRef(manifest.key, len(raw), digest_of(raw)), len(raw) + sum(each.pack.size for each in packs)


def _table_pack(seq: int, rank: int, key: str, whole: bool) -> tuple[FinishedPack, ShardEntries]:
    """A base in two ranges, of which rows 0 and 2 are then written again; or the changed rows as a row set."""
    fields = (Field("weight", "float32", COLS), Field("sum", "float32", 1))
    shard = Shard("sparse.t", TABLE_ROWS, TABLE_COLS, 0, TABLE_ROWS, rank * COLS, COLS, fields)
    rows = np.array((0, 2) if whole else CHANGED[seq], dtype=np.int64)
    values = table(seq)[:, rank * COLS : (rank + 1) * COLS]
    stale = np.full_like(values, -1)
    builder = PackBuilder()
    encoded = encode_rows(rows)
    builder.add("0.rows.0", "uint8", (len(encoded),), [encoded])
    pieces: list[tuple[range | int, Values]] = [(0, values[rows])]
    if whole:
        pieces = [(range(3), stale[:3]), (range(3, 6), values[3:]), (0, values[rows])]
        stale[1] = values[1]  # rows 0 and 2 stay stale in the first entry: the last one holds
    for part, (_, piece) in enumerate(pieces):
        builder.add(f"0.weight.{part}", "float32", piece.shape, [piece.tobytes()])
        builder.add(f"0.sum.{part}", "float32", (len(piece), 1), [(-piece[:, :1]).tobytes()])
    finished = builder.finish(key, 0)
    spans = iter(finished.spans[1:])
    entries = tuple(
        Entry(field.name, "raw", field.row_bytes, where, next(spans)) for where, _ in pieces for field in fields
    )
    return finished, ShardEntries(shard, (RowSet(len(rows), finished.spans[0]),), entries)


def _state_pack(key: str) -> tuple[FinishedPack, tuple[State, ...]]:
    tree, tokens = to_tree(
        dict(EVERY_KIND), path="state", as_tensor=lambda value: value if isinstance(value, HostTensor) else None
    )
    builder = PackBuilder()
    for index, token in enumerate(tokens):
        tensor = host_tensor(token)
        builder.add(f"reader.{index}", tensor.dtype, tensor.shape, [tensor.data])
    finished = builder.finish(key, 1)
    tensors = tuple(
        StateTensor(host_tensor(token).dtype, host_tensor(token).shape, span)
        for token, span in zip(tokens, finished.spans, strict=True)
    )
    return finished, (State("reader", tree, tensors),)


def host_tensor(token: object) -> HostTensor:
    if isinstance(token, HostTensor):
        return token
    assert isinstance(token, np.ndarray)
    return HostTensor(token.dtype.name, token.shape, memoryview(token.tobytes()))


def write(folder: Path) -> None:
    for prefix, files in (("repository", objects()), ("rowsets", row_sets())):
        for name, raw in files.items():
            path = folder / prefix / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN)
