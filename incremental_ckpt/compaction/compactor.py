"""Compacts one checkpoint: writes a part, and once all parts are there, the manifest of the equivalent base.

It must not know how records are put together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from incremental_ckpt.arguments import REPOSITORY, an, function, whole
from incremental_ckpt.compaction.cut import attempt_id, shards_of_part
from incremental_ckpt.compaction.part import PartWriter, Progress
from incremental_ckpt.errors import CorruptionError, NotFoundError, StorageError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Manifest, RankManifest, RankRef, Totals
from incremental_ckpt.format.sealed import digest_of
from incremental_ckpt.model import Shard
from incremental_ckpt.repository import Link, Repository
from incremental_ckpt.repository.read import chain_ranks
from incremental_ckpt.repository.records import distinct

MIB = 1 << 20
MEMORY = 512 * MIB
LEAST_MEMORY = 64 * MIB


@dataclass(frozen=True)
class CompactReport:
    """What a compaction did.

    Attributes:
        chain: how many checkpoints a resume of ``seq`` replayed before.
        complete: an equivalent base is there now, or ``seq`` is a base itself.
        missing: parts that other processes have not written yet.
        rows: rows of tables in this part; 0 where nothing was to be done.
        bytes_read, bytes_written: by this call.
    """

    seq: int
    chain: int
    complete: bool
    missing: tuple[int, ...]
    rows: int
    bytes_read: int
    bytes_written: int


def compact(
    repository: Repository,
    seq: int | None = None,
    *,
    memory: int = MEMORY,
    shard: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> CompactReport:
    """Write an equivalent base for a checkpoint (None: the newest); does nothing where there is one.

    It takes no number, so it may run while the trainer saves, and may be started again after a crash: what is there is
    verified and kept. Several processes share the work, each with its ``shard``; whichever ends last commits.

    Args:
        memory: bytes for buffers, beside what Python takes.
        shard: ``(i, n)``: this is process i of n, from 0.

    Raises:
        NotFoundError: no such checkpoint, or a prune has taken it meanwhile.
        CorruptionError: the chain is damaged, or the store does not give back what was written.
        MismatchError: the chain's columns are cut in ways that do not go together.
        StorageError: the store does not answer.
        ValueError, TypeError: too little memory, no such shard, or an argument is not what it should be.
    """
    an(Repository, "repository", repository, REPOSITORY)
    if not isinstance(shard, tuple) or [type(each) for each in shard] != [int, int]:
        raise TypeError(f"shard takes two ints, (i, n), not {shard!r}")
    part, parts = shard
    memory = whole("memory", memory)
    if progress is not None:
        function("progress", progress, "a function of bytes done and bytes in all")
    if not 0 <= part < parts:
        raise ValueError(f"shard must be (i, n) with 0 <= i < n, not {shard}")
    if memory < LEAST_MEMORY:
        raise ValueError(f"a compaction needs {LEAST_MEMORY // MIB} MiB of memory at least, not {memory / MIB:g} MiB")
    wanted = repository.resolve(seq)
    compactor = _Compactor(repository, wanted, memory, part, parts, progress, now)
    try:
        return repository.read_along(compactor.run, wanted)
    except CorruptionError:
        repository.resolve(wanted)  # a prune may have passed: then it is not damaged, but gone
        if len(repository.chain(wanted)) == 1:  # another compaction was faster, and a prune took this one's packs
            return CompactReport(wanted, 1, True, (), 0, 0, 0)
        raise


@dataclass(frozen=True)
class _Compactor:
    repository: Repository
    seq: int
    memory: int
    part: int
    parts: int
    progress: Progress | None
    now: Callable[[], datetime]

    def run(self, links: Sequence[Link]) -> CompactReport:
        if len(links) == 1:
            return CompactReport(self.seq, 1, True, (), 0, 0, 0)
        self.repository.equivalent(links[-1].manifest)  # one that is damaged stands where this one would: told first
        ranks = chain_ranks(self.repository, links)
        shards = distinct(entries.shard for rank in ranks[-1] for entries in rank.shards)
        attempts = [attempt_id(links, ranks, part, self.parts) for part in range(self.parts)]
        own = shards_of_part(shards, self.part, self.parts)
        writer = PartWriter(
            self.repository, ranks, seq=self.seq, attempt=attempts[self.part], part=self.part, parts=self.parts,
            memory=self.memory, progress=self.progress,
        )  # fmt: skip
        writer.write(own)
        missing = self._commit(links, shards, attempts)
        rows = sum(s.rows for s in own if s.col_start == 0)
        return CompactReport(self.seq, len(links), not missing, missing, rows, writer.bytes_read, writer.bytes_written)

    def _commit(self, links: Sequence[Link], shards: Sequence[Shard], attempts: Sequence[str]) -> tuple[int, ...]:
        """Create the manifest of the equivalent if all parts are there; else the parts that are not."""
        refs, totals, missing = [], Totals(0, 0, 0), []
        for part, attempt in enumerate(attempts):
            key = layout.rank_manifest_key(self.seq, attempt, part)
            try:
                raw = self.repository.store.get(key)
            except NotFoundError:
                missing.append(part)
                continue
            found = RankManifest.from_bytes(raw, key)
            self._verify(found, shards_of_part(shards, part, len(attempts)))
            refs.append(RankRef(key, len(raw), digest_of(raw)))
            totals = Totals(
                totals.rows + found.rows, 0, totals.bytes + len(raw) + sum(pack.size for pack in found.packs)
            )
        if missing:
            return tuple(missing)
        newest = links[-1].manifest
        totals = replace(totals, table_rows=newest.totals.table_rows)
        equivalent = replace(
            newest, kind="base", parent=None, next_parent=None, of=newest.digest, attempt=attempts[0],
            ranks=tuple(refs), totals=totals, created=self.now(), digest="",
        )  # fmt: skip
        self._create(equivalent)
        return ()

    def _verify(self, found: RankManifest, shards: Sequence[Shard]) -> None:
        """A part has the rows that it should have, in packs that are there. Who wrote it has read them back."""
        sizes = {o.key: o.size for o in self.repository.store.list(layout.attempt_prefix(self.seq, found.attempt))}
        whole = [entries.shard for entries in found.shards] == list(shards) and all(
            sum(entries.row_count(e) for e in entries.entries if e.field == each.name) == entries.shard.rows
            for entries in found.shards
            for each in entries.shard.fields
        )
        lost = [pack.key for pack in found.packs if sizes.get(pack.key) != pack.size]
        if lost or not whole:
            what = f"{lost[0]} is missing or cut short" if lost else "it does not hold the rows that it should"
            raise CorruptionError(
                f"{found.key} in {self.repository.store.url}, a part of a compaction, is of no use: {what}. Delete "
                f"{layout.attempt_prefix(self.seq, found.attempt)} and compact again",
                key=lost[0] if lost else found.key, expected="a whole part", found=what,
            )  # fmt: skip

    def _create(self, equivalent: Manifest) -> None:
        """The commit of the equivalent. One that is there already says the same in other bytes (its time)."""
        key, raw = equivalent.key, equivalent.to_bytes()
        try:
            if self.repository.store.put_if_absent(key, [raw]):
                return
        except StorageError as error:
            failure = error
        else:
            failure = StorageError(f"{self.repository.store.url} says that {key} exists and cannot find it")
        try:
            stored = Manifest.from_bytes(self.repository.store.get(key), key)
        except NotFoundError:
            raise failure from None
        if stored.of != equivalent.of:
            raise CorruptionError(
                f"{key} in {self.repository.store.url} belongs to another checkpoint (objects of two runs are mixed) "
                "and is ignored by readers. Delete it and compact again",
                key=key, expected=equivalent.of or "", found=stored.of or "none",
            )  # fmt: skip
