"""Measures compaction: its peak memory in a process of its own, and its speed against copying the base that it writes.

It must not know how records are moved.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from script import result_of, say, script_parser, show, write_result

MIB = 1 << 20
TABLES, DIM = 4, 64
MEMORY_TARGET = 700 * MIB
SPEED_TARGET = 0.5

_COMPACT = """
import json, sys, time
from incremental_ckpt.compaction import compact
from incremental_ckpt.repository import Repository
from incremental_ckpt.storage import open_store

def resident(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024

before, begun = resident("VmRSS"), time.perf_counter()
report = compact(Repository(open_store(sys.argv[1])), memory=int(sys.argv[2]))
seconds = time.perf_counter() - begun
assert report.complete and "torch" not in sys.modules
print(json.dumps({"seconds": seconds, "peak": resident("VmHWM"), "before": before, "chain": report.chain,
                  "read": report.bytes_read, "written": report.bytes_written}))
"""


def main(argv: list[str] | None = None) -> int:
    write_result(parse_arguments(argv), "compact", run)
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "compact.json")
    parser.add_argument("--mib", type=int, default=4096, help="of the whole chain, about")
    parser.add_argument("--deltas", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.02, help="of the rows that each delta carries")
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--memory", type=int, default=512, help="MiB given to the compaction")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of A B A B")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from conditions import conditions
    from rows import Target, ratio_row

    facts = conditions(folder)
    store = folder / "run"
    begun = time.perf_counter()
    make_chain(store, arguments)
    say("the chain is there", begun)
    chain_bytes = sum(f.stat().st_size for f in store.rglob("*.safetensors"))
    pairs, found = [], []
    for _ in range(arguments.repeats):
        copied = copy_base(store, folder / "copy")
        found.append(compact_in_a_child(store, arguments.memory * MIB))
        pairs.append((copied, found[-1]["seconds"]))
    peak = max(each["peak"] for each in found)
    details = {
        "chain_bytes": chain_bytes,
        "read_bytes": found[0]["read"],
        "written_bytes": found[0]["written"],
        "copy_seconds": min(a for a, _ in pairs),
        "compact_seconds": min(b for _, b in pairs),
    }
    rows = [
        ratio_row(
            "memory", "peak resident memory of compacting / 700 MiB", [(e["peak"], MEMORY_TARGET) for e in found],
            Target("at most", 1.0), peak_bytes=peak, resident_before_bytes=found[0]["before"], chain_bytes=chain_bytes,
            memory_bytes=arguments.memory * MIB,
        ),
        ratio_row(
            "compaction", f"speed of compacting a base and {arguments.deltas} deltas / cp and fsync of the base",
            pairs, Target("at least", SPEED_TARGET), **details,
        ),
    ]  # fmt: skip
    show(rows)
    facts |= {"deltas": arguments.deltas, "share": arguments.share, "codec": arguments.codec, "dim": DIM}
    return result_of(facts | {"repeats": arguments.repeats}, rows)


def make_chain(store: Path, arguments: argparse.Namespace) -> None:
    """A base and deltas of random rows, with a row-wise state as row-wise Adagrad has it."""
    import numpy as np

    from incremental_ckpt.codecs import codec_named
    from incremental_ckpt.format.layout import new_id
    from incremental_ckpt.format.manifest import Lineage, Manifest, Totals
    from incremental_ckpt.model import WEIGHT, CheckpointRef, Field, Shard, Table
    from incremental_ckpt.rank_writer import Attempt, RankWriter
    from incremental_ckpt.repository import Repository
    from incremental_ckpt.snapshot import Part, rows_per_entry
    from incremental_ckpt.storage import LocalStore

    fields = (Field(WEIGHT, "float32", DIM), Field("momentum1", "float32", 1))
    row = sum(field.row_bytes for field in fields)
    rows = int(arguments.mib * MIB / row / (1 + arguments.deltas * arguments.share) / TABLES)
    tables = [Table(Shard(f"t{i}", rows, DIM, 0, rows, 0, DIM, fields), {}, tracked=True) for i in range(TABLES)]
    step = rows_per_entry([field.row_bytes for field in fields], 8 * MIB)
    draw = np.random.default_rng(0)
    noise = draw.standard_normal((step, DIM + 1)).astype(np.float32)
    codecs = {WEIGHT: codec_named(arguments.codec), "optimizer": codec_named("raw")}
    repository, job = Repository(LocalStore(store)), new_id()
    repository.create()
    parent: CheckpointRef | None = None
    for seq in range(1, arguments.deltas + 2):
        kind: Any = "base" if seq == 1 else "delta"
        attempt = Attempt(
            seq=seq, attempt=new_id(), kind=kind, parent=parent, next_parent=None, step=seq, epoch=None, loss=None,
            metrics={}, job=job, lineage=(Lineage(job, 1, 0),), environment={},
        )  # fmt: skip
        writer = RankWriter(repository, attempt, tables, codecs, rank=0, world_size=1)
        for index in range(TABLES):
            ids = np.arange(rows) if seq == 1 else np.flatnonzero(draw.random(rows) < arguments.share)
            for begin in range(0, len(ids), step):
                part = ids[begin : begin + step]
                values = noise[: len(part)] + np.float32(seq)
                arrays = (np.ascontiguousarray(values[:, :DIM]), np.ascontiguousarray(values[:, DIM:]))
                carried = range(begin, begin + len(part)) if seq == 1 else part
                packed = tuple(a.view(np.uint8).reshape(len(part), -1) for a in arrays)
                writer.add_rows([Part(index, carried, packed)])
        ballot = writer.vote(())
        manifest = repository.commit(
            Manifest(
                seq=seq, step=seq, epoch=None, loss=None, metrics={}, kind=kind, parent=parent, next_parent=None,
                job=job, attempt=attempt.attempt, lineage=tuple(attempt.lineage), created=datetime.now(UTC),
                world_size=1, ranks=(ballot.ref,), totals=Totals(ballot.rows, ballot.table_rows, ballot.bytes),
                environment={},
            )
        )  # fmt: skip
        parent = manifest.ref


def copy_base(store: Path, target: Path) -> float:
    """Seconds that it takes to copy the base's packs, durably."""
    packs = sorted(store.glob("data/00000001-*/*.safetensors"))
    target.mkdir()
    begun = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", *map(str, packs), str(target)], check=True)
    for pack in target.iterdir():
        fd = os.open(pack, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    seconds = time.perf_counter() - begun
    shutil.rmtree(target)
    return seconds


def compact_in_a_child(store: Path, memory: int) -> dict[str, Any]:
    command = [sys.executable, "-c", _COMPACT, str(store), str(memory)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    for equivalent in store.glob("manifests/*.base.json"):
        seq = equivalent.name.partition(".")[0]
        written = json.loads(equivalent.read_text())["ranks"]
        equivalent.unlink()
        for folder in {store / "data" / rank["key"].split("/")[1] for rank in written}:
            assert folder.name.startswith(f"{seq}-c")
            shutil.rmtree(folder)
    return found


if __name__ == "__main__":
    sys.exit(main())
