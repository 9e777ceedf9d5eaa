"""What a resume is going to read of a chain: its structure, verified before anything is changed.

It must not know how rows or state are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from incremental_ckpt.errors import CorruptionError, NotFoundError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Manifest, Place, RankManifest, Wanted
from incremental_ckpt.model import Difference, Shard, Table
from incremental_ckpt.repository import Link, Repository


@dataclass(frozen=True)
class Found:
    """A chain whose structure is verified: every manifest, every rank manifest that is needed, and the size of their
    packs.

    Attributes:
        links: base first.
        tables: per link the rank manifests that tables are read from.
        state: the rank manifests of the newest checkpoint that this rank's state is read from, its own first.
        same_ranks: it was saved by as many ranks as there are now.
        same_shards: this rank held the same shards then.
    """

    links: Sequence[Link]
    tables: Sequence[Sequence[RankManifest]]
    state: Sequence[RankManifest]
    same_ranks: bool
    same_shards: bool

    @property
    def bytes(self) -> int:
        """Size of the packs."""
        return sum(p.size for link in self.tables for rank in link for p in rank.packs)

    def shards(self) -> dict[str, list[Shard]]:
        """The tables of the newest checkpoint by name."""
        found: dict[str, list[Shard]] = {}
        for rank in self.tables[-1]:
            for entries in rank.shards:
                found.setdefault(entries.shard.table, []).append(entries.shard)
        return found


def find(
    repository: Repository, links: Sequence[Link], live: Sequence[Table], *, rank: int = 0, world_size: int = 1
) -> Found:
    """Verify the structure of what a rank needs of a chain, before anything is changed.

    Where the sharding is the same, that is its own manifests and those that hold what all ranks share; else all.

    Args:
        live: the tables of this rank.

    Raises:
        CorruptionError: naming the object.
        NotFoundError: a rank manifest or a pack is missing: a prune or a compaction may have passed.
    """
    found = [_chosen(repository, link.tables, live, rank, world_size) for link in links]
    chosen = [manifests for manifests, _ in found]
    newest = links[-1].manifest
    same_ranks = len(newest.ranks) == world_size
    same_tables = links[-1].tables is newest
    state, same_shards = found[-1] if same_tables else _chosen(repository, newest, live, rank, world_size)
    own = rank % len(newest.ranks)
    state = sorted(state, key=lambda r: (r.rank != own, r.rank))
    for each in {id(r): r for ranks in (*chosen, state) for r in ranks}.values():
        _check_packs(repository, each)
    return Found(links, chosen, state, same_ranks, same_shards)


def _chosen(
    repository: Repository, manifest: Manifest, live: Sequence[Table], rank: int, world_size: int
) -> tuple[list[RankManifest], bool]:
    """The rank manifests of one checkpoint that hold this rank's shards, and whether the rank held the same then."""
    refs = manifest.ranks
    if manifest.of is None and len(refs) == world_size:
        own = repository.rank_manifest(refs[rank])
        if _places(s.shard for s in own.shards) == _places(t.shard for t in live):
            others = (ref for r, ref in enumerate(refs) if ref.shared and r != rank)
            return [own, *(repository.rank_manifest(ref, lambda place: place.replicated) for ref in others)], True
    return repository.rank_manifests(manifest, _overlapping(live)), False


def _overlapping(live: Sequence[Table]) -> Wanted:
    """Shards with rows and columns of these tables; of tables that are not among them, or without rows here, all: those
    are only compared."""
    by_table: dict[str, list[Shard]] = {}
    for table in live:
        by_table.setdefault(table.shard.table, []).append(table.shard)

    def wanted(place: Place) -> bool:
        mine = by_table.get(place.table)
        return mine is None or any(
            not s.rows
            or (place.row_start < s.row_start + s.rows and s.row_start < place.row_start + place.rows
            and place.col_start < s.col_start + s.cols and s.col_start < place.col_start + place.cols)
            for s in mine
        )  # fmt: skip

    return wanted


def _places(shards: Iterable[Shard]) -> set[tuple[str, int, int, int, int]]:
    return {(s.table, s.row_start, s.rows, s.col_start, s.cols) for s in shards}


def _check_packs(repository: Repository, found: RankManifest) -> None:
    prefix = layout.rank_manifest_key(found.seq, found.attempt, found.rank).removesuffix(".json")
    sizes = {o.key: o.size for o in repository.store.list(prefix)} if found.packs else {}
    for pack in found.packs:
        if pack.key not in sizes:
            raise NotFoundError(f"no object {pack.key} in {repository.store.url}", key=pack.key)
        if sizes[pack.key] != pack.size:
            raise CorruptionError(
                f"{pack.key} in {repository.store.url} has {sizes[pack.key]} bytes instead of {pack.size}. Restore it "
                "from a copy, or resume an ancestor",
                key=pack.key, expected=f"{pack.size} bytes", found=f"{sizes[pack.key]}",
            )  # fmt: skip


def compare_tables(
    found: Mapping[str, Sequence[Shard]], live: Sequence[Table], *, elsewhere: Collection[str] = ()
) -> list[Difference]:
    """How the tables of a checkpoint and of a model differ in names, shapes and the dtype of their weights.

    Args:
        elsewhere: tables of the model that other ranks hold, and compare.
    """
    ours = {t.shard.table: t.shard for t in live}
    differing = []
    for table in sorted(ours.keys() & found.keys()):
        mine, theirs = _shape(ours[table]), _shape(found[table][0])
        if mine != theirs:
            differing.append(Difference(f"table {table} is {mine} in the model and {theirs} in the checkpoint", True))
    for table in sorted(ours.keys() - found.keys()):
        differing.append(Difference(f"table {table} ({_shape(ours[table])}) is in the model and not in the checkpoint"))
    for table in sorted(found.keys() - ours.keys() - set(elsewhere)):
        shape = _shape(found[table][0])
        differing.append(Difference(f"table {table} ({shape}) is in the checkpoint and not in the model"))
    return differing


def _shape(shard: Shard) -> str:
    return f"{shard.table_rows} x {shard.table_cols} {shard.dtype}"
