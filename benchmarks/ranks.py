"""Simulates the checkpoints of a large job without training it: what manifests weigh, what a commit and a resume take.

Every rank has a shard of every table (row-wise, the most that a plan can ask for). It must not know any model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rows import Row, Target
from timing import seconds_of

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from incremental_ckpt.agreement import model_report  # noqa: E402
from incremental_ckpt.codecs import codec_named  # noqa: E402
from incremental_ckpt.coordinator import _deduplicated, _written  # noqa: E402
from incremental_ckpt.format import layout  # noqa: E402
from incremental_ckpt.format.manifest import Lineage, Manifest  # noqa: E402
from incremental_ckpt.format.rank_facts import SHARED  # noqa: E402
from incremental_ckpt.format.rank_manifest import VoteFacts  # noqa: E402
from incremental_ckpt.format.sealed import digest_of, unseal  # noqa: E402
from incremental_ckpt.model import CheckpointRef, Field, Shard, Table  # noqa: E402
from incremental_ckpt.persist import Persister  # noqa: E402
from incremental_ckpt.rank_writer import Attempt, Ballot, Content, RankWriter, ballot_of  # noqa: E402
from incremental_ckpt.repository import Repository  # noqa: E402
from incremental_ckpt.repository.read import ChainShards, TableChain  # noqa: E402
from incremental_ckpt.restore import find  # noqa: E402
from incremental_ckpt.settings import Settings  # noqa: E402
from incremental_ckpt.sharing import writers  # noqa: E402
from incremental_ckpt.snapshot import HostArena, Part, StateCopy, flatten_state  # noqa: E402
from incremental_ckpt.storage import LocalStore  # noqa: E402
from incremental_ckpt.testing import TracingStore  # noqa: E402

ROWS, CHANGED, DIM = 4, 2, 4
"""Rows of a shard, those of them that a delta carries, and columns: small, since only what is around them counts."""

CODECS = {"weight": codec_named("raw"), "optimizer": codec_named("raw")}
JOB = "0" * 15 + "1"


@dataclass(frozen=True)
class Figures:
    """Of one simulated job, in bytes, seconds and counts.

    Attributes:
        vote_bytes, manifest_bytes: of one rank's manifest and of the manifest of a delta.
        vote_seconds: one rank writes its pack and its vote.
        commit_seconds: rank 0 does that, collects the votes of all others and commits.
        same_*: one rank plans a resume with the shards that it had; ``manifests`` are rank manifests that it reads.
        other_*: the same where half as many ranks saved.
        report_bytes, answer_bytes: what a rank says when the job begins, and what all ranks are told then.
    """

    ranks: int
    tables: int
    vote_bytes: int
    manifest_bytes: int
    checkpoint_bytes: int
    vote_seconds: float
    commit_seconds: float
    same_manifests: int
    same_bytes: int
    same_seconds: float
    other_manifests: int
    other_bytes: int
    other_seconds: float
    report_bytes: int
    answer_bytes: int


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    jobs = []
    for halvings in range(arguments.halvings, -1, -1):
        ranks = arguments.ranks >> halvings
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="ranks-benchmark-") as folder:
            jobs.append(simulate(Path(folder), ranks, arguments.tables))
            print(json.dumps(vars(jobs[-1])), flush=True)
    from conditions import conditions

    result = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "conditions": conditions(arguments.folder) | {"ranks": arguments.ranks, "tables": arguments.tables},
        "rows": [row.as_json() for row in rows_of(jobs)],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {arguments.out}")
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument(
        "--halvings", type=int, choices=(1, 2), default=2, help="also simulated: a half (and a quarter) of the ranks"
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ranks.json")
    return parser.parse_args(argv)


_WHAT = {
    "vote_bytes": "bytes of one rank's manifest",
    "manifest_bytes": "bytes of the checkpoint's manifest",
    "commit_seconds": "seconds until rank 0 has written, read all votes and committed",
    "same_manifests": "rank manifests that a resume with the same shards reads",
    "same_bytes": "bytes of all manifests that it reads",
    "same_seconds": "seconds to plan it",
    "other_seconds": "seconds to plan a resume with other shards",
    "answer_bytes": "bytes told to every rank when a job begins",
}


def rows_of(jobs: Sequence[Figures]) -> list[Row]:
    """How the figures grow from half of the ranks to all of them: 1 is not at all, 2 is with their number."""
    half, whole = jobs[-2], jobs[-1]

    def growth(name: str, at_most: float) -> Row:
        small, large = getattr(half, name), getattr(whole, name)
        ratio = large / small
        details = {f"{name}, {job.ranks} ranks": getattr(job, name) for job in jobs}
        details["growth per rank"] = (large - small) / (whole.ranks - half.ranks)
        what = f"{_WHAT[name]}: {whole.ranks} ranks / {half.ranks} ranks, {whole.tables} tables each"
        return Row("ranks", what, ratio, (ratio, ratio), 1, Target("at most", at_most), details)

    return [
        growth("vote_bytes", 1.05),
        growth("manifest_bytes", 2.05),
        growth("commit_seconds", 2.5),
        growth("same_manifests", 1.0),
        growth("same_bytes", 1.3),
        growth("same_seconds", 1.5),
        growth("other_seconds", 2.5),
        growth("answer_bytes", 1.2),
    ]


def simulate(folder: Path, ranks: int, tables: int) -> Figures:
    """Write a base and a delta of all ranks, then plan the resume of one."""
    repository = Repository(LocalStore(folder / "store"))
    base = _save(repository, 1, None, ranks, tables)
    delta = _save(repository, 2, CheckpointRef(1, base.manifest.digest), ranks, tables)
    last = ranks - 1
    same = _plan(folder, tables_of(last, ranks, tables), last, ranks)
    other = _plan(folder, tables_of(last, 2 * ranks, tables, height=ROWS // 2), last, 2 * ranks)
    key = layout.rank_manifest_key(2, delta.manifest.attempt, last)
    reports = [_report(rank, ranks, tables) for rank in range(ranks)]
    distinct, places = _deduplicated(reports)
    return Figures(
        ranks, tables,
        vote_bytes=len(repository.store.get(key)),
        manifest_bytes=len(repository.store.get(layout.manifest_key(2))),
        checkpoint_bytes=delta.manifest.totals.bytes,
        vote_seconds=delta.vote_seconds, commit_seconds=delta.commit_seconds,
        same_manifests=same.manifests, same_bytes=same.bytes, same_seconds=same.seconds,
        other_manifests=other.manifests, other_bytes=other.bytes, other_seconds=other.seconds,
        report_bytes=len(_written(reports[last])),
        answer_bytes=len(_written({"missing": [], "distinct": distinct, "reports": places})),
    )  # fmt: skip


def tables_of(rank: int, ranks: int, tables: int, height: int = ROWS) -> list[Table]:
    """Row-wise shards. ``height`` rows of each table are this rank's."""
    fields = (Field("weight", "float32", DIM), Field("sum", "float32", 1))
    return [
        Table(
            Shard(f"sparse.embedding_bags.table_{t}", ranks * height, DIM, rank * height, height, 0, DIM, fields),
            {},
            True,
        )
        for t in range(tables)
    ]


@dataclass(frozen=True)
class _Saved:
    manifest: Manifest
    vote_seconds: float
    commit_seconds: float


def _save(repository: Repository, seq: int, parent: CheckpointRef | None, ranks: int, tables: int) -> _Saved:
    """All ranks write, one after the other; rank 0 comes last and commits, which is measured for a delta."""
    attempt = Attempt(
        seq=seq, attempt=f"{seq:016x}", kind="base" if parent is None else "delta", parent=parent, next_parent=None,
        step=seq, epoch=None, loss=None, metrics={}, job=JOB, lineage=(Lineage(JOB, 1, 0),), environment={},
    )  # fmt: skip
    repository.create()
    like = min(ranks - 1, writers(ranks))  # what the ranks behind it write differs in numbers only
    ballots: list[Ballot] = []
    vote_seconds = 0.0
    for rank in range(1 if parent is not None else 0, like + 1):
        content = _content(rank, ranks, tables, whole=parent is None)
        writer = RankWriter(repository, attempt, content.tables, CODECS, rank=rank, world_size=ranks)

        def write(writer: RankWriter = writer, content: Content = content) -> None:
            for packful, overriding in content.packfuls:
                writer.add_rows(packful, overriding=overriding)
            ballots.append(writer.vote(writer.add_state(content.state, Settings().pack_bytes)))

        vote_seconds = seconds_of(write)
    ballots += _write_alike(repository, attempt, like, range(like + 1, ranks))
    persister = Persister(repository, CODECS, Settings(), rank=0, world_size=ranks)
    if parent is None:
        return _Saved(repository.commit(persister._manifest(attempt, ballots)), vote_seconds, 0.0)
    content = _content(0, ranks, tables, whole=False)
    commit_seconds = seconds_of(lambda: persister.persist(attempt, content, threading.Event()))
    return _Saved(repository.manifest(seq), vote_seconds, commit_seconds)


def _write_alike(repository: Repository, attempt: Attempt, like: int, ranks: range) -> list[Ballot]:
    """What ``ranks`` would write and vote, made from what rank ``like`` has written: equal but for three numbers."""
    source = layout.rank_manifest_key(attempt.seq, attempt.attempt, like)
    raw = bytes(repository.store.get(source))
    facts, members = VoteFacts.from_bytes(raw, source), unseal(raw, source)
    packs = [bytes(repository.store.get(pack["key"])) for pack in members["packs"]]
    prefix = len(b'{"digest":"",') + len(digest_of(raw))
    ballots = []
    for rank in ranks:
        key = layout.rank_manifest_key(attempt.seq, attempt.attempt, rank)
        body = b"{" + raw[prefix:].replace(b'"rank":%d,' % like, b'"rank":%d,' % rank).replace(
            b'"row_start":%d,' % (like * ROWS), b'"row_start":%d,' % (rank * ROWS)
        )
        for index, written in enumerate(packs):
            own = layout.pack_key(attempt.seq, attempt.attempt, rank, index)
            repository.store.put(own, [written])
            body = body.replace(layout.pack_key(attempt.seq, attempt.attempt, like, index).encode(), own.encode())
        sealed = b'{"digest":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body[1:]
        repository.store.put(key, [sealed])
        ballots.append(ballot_of(replace(facts, key=key), sealed))
    return ballots


def _content(rank: int, ranks: int, tables: int, *, whole: bool) -> Content:
    rows: range | np.ndarray = range(ROWS) if whole else np.arange(CHANGED) * 2
    values = np.zeros((len(rows), 4 * DIM), np.uint8), np.zeros((len(rows), 4), np.uint8)
    packful = [Part(index, rows, values) for index in range(tables)]
    return Content(tables_of(rank, ranks, tables), _state(rank, ranks), [(packful, False)], lambda: None)


def _state(rank: int, ranks: int) -> tuple[StateCopy, ...]:
    state: dict[str, Any] = {"dense": {}, "optimizer": {}, "fused": [], "rng": {}, "user": {}}
    if rank < writers(ranks):
        state[SHARED] = {"dense": {f"over.{rank}.weight": np.zeros((8, 8), np.float32)}, "optimizer": {}}
    flat = flatten_state(state)
    arena = HostArena(pinned=False)
    arena.reserve(flat.arena_bytes)
    return flat.copy(arena)


@dataclass(frozen=True)
class _Planned:
    manifests: int
    bytes: int
    seconds: float


def _plan(folder: Path, tables: Sequence[Table], rank: int, ranks: int) -> _Planned:
    """What a rank does before it reads rows: manifests, rank manifests, sizes of packs, row sets, reads."""
    store = TracingStore(LocalStore(folder / "store"))

    def plan() -> None:
        repository = Repository(store)
        found = find(repository, repository.links(2), tables, rank=rank, world_size=ranks)
        shards = ChainShards(found.tables)
        for table in tables:
            shard = table.shard
            chain = TableChain(repository, shards, shard.table)
            for field in shard.fields:
                rows = range(shard.row_start, shard.row_start + shard.rows)
                chain.plan(field.name, rows, range(shard.col_start, shard.col_start + shard.cols))

    seconds = seconds_of(plan)
    read = [one for one in store.find("get") if one.op.key.endswith(".json")]
    votes = {one.op.key for one in read if "/rank-" in one.op.key}
    return _Planned(len(votes), sum(one.size for one in read), seconds)


def _report(rank: int, ranks: int, tables: int) -> dict[str, Any]:
    shards = [table.shard for table in tables_of(rank, ranks, tables)]
    return model_report(shards, {}, ["reader"], "0.1.0") | {"error": None, "job": JOB if rank == 0 else None}


if __name__ == "__main__":
    sys.exit(main())
