"""Reads all rows of a chain into live tables, several entries at a time.

It must not know manifests of checkpoints, nor what becomes of a record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from incremental_ckpt.format.replay import Read
from incremental_ckpt.model import Table
from incremental_ckpt.repository import Repository
from incremental_ckpt.repository.read import ChainShards, TableChain
from incremental_ckpt.restore.found import Found
from incremental_ckpt.restore.target import MEAN, Target


def load_tables(
    repository: Repository,
    found: Found,
    tables: Sequence[Table],
    *,
    threads: int,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Read all rows of the given tables into their live tensors.

    Returns:
        Where row-wise optimizer state was put back by a rule, since columns were sharded otherwise; a line each.

    Raises:
        CorruptionError: a checksum does not fit. The tensors are then undefined, and to be loaded again.
        NotFoundError: a pack is missing.
    """
    buffers = threading.local()
    rules: list[str] = []

    def load(target: Target, chain: TableChain, read: Read) -> int:
        size = read.entry.at.size
        if getattr(buffers, "memory", None) is None or len(buffers.memory) < size:
            buffers.memory = bytearray(size)
        target.put(read, chain.records(read, memoryview(buffers.memory)[:size]))
        return size

    def load_straight(chain: TableChain, read: Read, memory: memoryview) -> int:
        chain.records(read, memory)
        return read.entry.at.size

    shards = ChainShards(found.tables)
    with ThreadPoolExecutor(threads, "ickpt-read") as pool:
        jobs: list[Future[int]] = []
        later: list[Callable[[], list[Future[int]]]] = []
        for table in tables:
            shard = table.shard
            chain = TableChain(repository, shards, shard.table)
            stored = {field.name for part in found.shards().get(shard.table, ()) for field in part.fields}
            for field in shard.fields:
                if field.name not in stored:
                    continue  # not strict: it stays as it is
                rows = range(shard.row_start, shard.row_start + shard.rows)
                reads = chain.plan(field.name, rows, range(shard.col_start, shard.col_start + shard.cols))
                target = Target(table, field)
                rule = target.begin(reads)
                if rule is not None:
                    rules.append(f"table {shard.table}: {field.name} is {rule}")
                # What is added up for a mean must find nothing in its rows.
                straight, others = target.split(reads) if rule != MEAN else ([], reads)
                jobs += [pool.submit(load_straight, chain, read, memory) for read, memory in straight]
                # Several parts of a mean meet in one row: their sum must not depend on the order of threads.
                later.append(partial(_submitted, pool, load, target, chain, others, parallel=rule != MEAN))
        try:
            _finish(jobs, progress)
            _finish([job for submit in later for job in submit()], progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return rules


def _finish(jobs: Sequence[Future[int]], progress: Callable[[int], None] | None) -> None:
    for job in jobs:
        nbytes = job.result()
        if progress is not None:
            progress(nbytes)


def _submitted(
    pool: ThreadPoolExecutor,
    load: Callable[[Target, TableChain, Read], int],
    target: Target,
    chain: TableChain,
    reads: Sequence[Read],
    *,
    parallel: bool,
) -> list[Future[int]]:
    if parallel:
        return [pool.submit(load, target, chain, read) for read in reads]
    return [pool.submit(lambda: sum(load(target, chain, read) for read in reads))]
