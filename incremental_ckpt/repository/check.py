"""Proof that a repository can be restored: what is named exists, is whole, and covers every row.

It must not know models, ranks or threads, and must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from incremental_ckpt.arguments import flag
from incremental_ckpt.errors import CheckpointError, CorruptionError, FormatError, NotFoundError, StorageError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Manifest, Outcome, RankManifest, RankRef, Span
from incremental_ckpt.format.pack import checksum, read_header
from incremental_ckpt.model import Field
from incremental_ckpt.repository.chain import key_of, walk
from incremental_ckpt.repository.read import ChainShards, TableChain, check_backing, read_span

if TYPE_CHECKING:
    from incremental_ckpt.repository.chain import Link
    from incremental_ckpt.repository.core import Repository
    from incremental_ckpt.repository.listing import Listing

Progress = Callable[[int, int, int], None]
"""``progress(checkpoints done, checkpoints in all, bytes read)``."""

_PASSES = 12
"""How often a prune or a compaction may overtake one check."""
_LOST = "missing, and nothing says that this checkpoint was forgotten: it is lost"
_MOST_LOST = 100
"""Numbers that are named; a marker that was tampered with could name any."""
_Part = tuple[str, int, int, int, int, tuple[Field, ...]]


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be: the checkpoint it was met in, the object, and what is wrong.

    Attributes:
        newer: a newer version has written it, so that an upgrade mends it.
    """

    seq: int
    key: str
    what: str
    newer: bool = False


@dataclass(frozen=True)
class CheckReport:
    """What a check found.

    Attributes:
        checkpoints: how many visible checkpoints there are.
        problems: everything that is wrong.
        restorable: numbers that can be restored, ascending; by their chain, where an equivalent base is damaged.
        damaged: all other visible numbers, ascending.
        lost: numbers that were committed and whose manifest is gone, though no prune has forgotten them; ascending.
        objects: how many objects were looked at.
        bytes_read: how many bytes were read.
    """

    checkpoints: int
    problems: tuple[Problem, ...]
    restorable: tuple[int, ...]
    damaged: tuple[int, ...]
    objects: int
    bytes_read: int
    lost: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass
class _Own:
    """Problems of what a manifest names itself: those that keep a resume from its rows, from its state, and all of
    them."""

    rows: list[Problem] = field(default_factory=list)
    state: list[Problem] = field(default_factory=list)
    every: list[Problem] = field(default_factory=list)

    def add(self, problem: Problem, *, rows: bool = True, state: bool = True) -> None:
        self.every.append(problem)
        if rows:
            self.rows.append(problem)
        if state:
            self.state.append(problem)


class _Check:
    """Passes over one repository. What is learnt of a manifest is kept by its digest: chains share their checkpoints,
    and a pass after the first reads only what is new or was not as it should be.

    Each rank manifest is parsed once. Those of one base at a time stay in memory, until its rows are looked for.
    """

    def __init__(self, repository: Repository, deep: bool, progress: Progress | None) -> None:
        self._repository = repository
        self._deep = deep
        self._progress = progress
        self._own: dict[str, _Own] = {}
        self._uncovered: dict[tuple[str, str], list[Problem]] = {}
        self._layouts: dict[str, frozenset[_Part]] = {}
        self._same: dict[frozenset[_Part], frozenset[_Part]] = {}
        self._base: tuple[str, list[RankManifest]] | None = None
        self._done = 0
        self._total = 0
        self.objects = 0
        self.bytes_read = 0

    def run(self, listing: Listing) -> CheckReport:
        self._own = {digest: own for digest, own in self._own.items() if not own.every}
        self._uncovered = {chain: missing for chain, missing in self._uncovered.items() if not missing}
        problems: dict[Problem, None] = {}
        restorable: list[int] = []
        damaged: list[int] = []
        self._total = len(listing.seqs)
        lost, unnamed = self._lost(listing)
        told = [Problem(seq, layout.manifest_key(seq), _LOST) for seq in lost]
        if unnamed:
            told.append(Problem(max(lost, default=0), "", f"{unnamed} more numbers have no manifest either"))
        problems |= dict.fromkeys(told)
        for self._done, seq in enumerate(listing.seqs):
            self._report()
            found, fatal = self._chain(seq, listing)
            whole = not fatal or self._is_whole_without_damaged_bases(seq, listing)
            (restorable if whole else damaged).append(seq)
            problems.update(dict.fromkeys(found))
        self._done = self._total
        self._report()
        return CheckReport(
            checkpoints=len(listing.seqs), problems=tuple(problems), restorable=tuple(restorable),
            damaged=tuple(damaged), objects=self.objects, bytes_read=self.bytes_read, lost=lost,
        )  # fmt: skip

    def _lost(self, listing: Listing) -> tuple[tuple[int, ...], int]:
        """Numbers without a manifest below one that was committed (I4: they are given without a gap, and none is ever
        freed), and how many more there are."""
        there = {*listing.seqs, *listing.gone}
        below = sorted(there | {self._highest(listing) + 1})
        lost: list[int] = []
        unnamed, last = 0, 0
        for number in below:
            named = range(last + 1, min(number, last + 1 + _MOST_LOST - len(lost)))
            unnamed += number - last - 1 - len(named)
            lost += [seq for seq in named if not self._has_come(seq)]
            last = number
        return tuple(lost), unnamed

    def _highest(self, listing: Listing) -> int:
        """The highest number that some object shows to have been committed."""
        known = {0, *listing.seqs, *listing.gone, *listing.bases}
        try:
            known |= {marker.newest for marker in self._repository.resume_markers()}
        except (CorruptionError, FormatError, NotFoundError):
            pass  # a prune stops there and says so; a restore needs none
        newest = max(known)
        begin = layout.attempt_prefix(newest, "f" * 16) if newest else ""
        for stored in self._repository.store.list(layout.DATA, after=begin):
            parsed = layout.parse_key(stored.key)
            if parsed is not None and parsed.what == "outcome" and parsed.seq > newest:
                try:
                    outcome = Outcome.from_bytes(self._repository.store.get(stored.key), stored.key)
                except (CorruptionError, FormatError, NotFoundError):
                    continue  # word to ranks that have long ended: nobody else needs it
                known |= {outcome.seq} if outcome.committed else set()
        return max(known)

    def _has_come(self, seq: int) -> bool:
        """A listing is of no single moment: it may show a number and have passed by the one before."""
        try:
            self._repository.manifest(seq)
        except NotFoundError:
            return False
        except (CorruptionError, FormatError):
            return True
        return True

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total, self.bytes_read)

    def _chain(self, seq: int, listing: Listing) -> tuple[list[Problem], list[Problem]]:
        """All problems of a chain, and those that keep a resume from it: rows are read from each link's tables, state
        from the newest checkpoint alone. An equivalent base whose manifest cannot be read is passed over, as by a
        resume."""
        unread: list[Problem] = []

        def pass_over(base: int, error: CheckpointError) -> None:
            unread.append(_problem(base, layout.base_key(base), error))

        try:
            links = [*walk(self._repository, self._repository.manifest(seq), listing.bases, pass_over)][::-1]
            found = [
                p
                for link in links
                for m in {link.manifest.digest: link.manifest, link.tables.digest: link.tables}.values()
                for p in self.own(m).every
            ]
            lost = [p for link in links for p in self.own(link.tables).rows]
            lost = lost + self.own(links[-1].manifest).state or self.coverage(links)
        except CheckpointError as error:
            found = lost = [_problem(seq, layout.manifest_key(seq), error)]
        if unread:  # what a prune took since the equivalent was there is no problem of its own
            found = unread + [problem for problem in found or lost if problem.seq not in listing.gone]
        return found or lost, lost

    def _is_whole_without_damaged_bases(self, seq: int, listing: Listing) -> bool:
        """An equivalent base that is damaged is passed over by a resume, as long as the chain that it stands for is
        there."""
        below = sorted(base for base in listing.bases if base <= seq)
        return any(
            not self._chain(seq, replace(listing, bases=frozenset(below[:count])))[1]
            for count in reversed(range(len(below)))
        )

    def own(self, manifest: Manifest) -> _Own:
        """Problems of what a manifest names itself, found once."""
        key = manifest.digest
        if key not in self._own:
            self._own[key] = self._look(manifest)
        return self._own[key]

    def _look(self, manifest: Manifest) -> _Own:
        own = _Own()
        self.objects += 1
        kept: list[RankManifest] = []
        parts: set[_Part] = set()
        for ref in manifest.ranks:
            self.objects += 1
            self.bytes_read += ref.size
            try:
                rank = self._repository.rank_manifest(ref)
                parts |= _parts(rank)
                if manifest.kind == "base":
                    kept.append(rank)
                self._packs(manifest.seq, rank, ref, own)
            except CheckpointError as error:
                own.add(_problem(manifest.seq, ref.key, error))
        layout_of = frozenset(parts)
        self._layouts[manifest.digest] = self._same.setdefault(layout_of, layout_of)
        if manifest.kind == "base":
            self._base = manifest.digest, kept
        return own

    def _packs(self, seq: int, rank: RankManifest, ref: RankRef, own: _Own) -> None:
        sizes = {o.key: o.size for o in self._repository.store.list(layout.attempt_prefix(rank.seq, rank.attempt))}
        if sizes.get(ref.key) != ref.size:
            # What was read of it has the digest that it should have; what comes behind that is read by nobody.
            problem = Problem(seq, ref.key, f"has {sizes.get(ref.key)} bytes instead of {ref.size}")
            own.add(problem, rows=False, state=False)
        if rank.vote != "ok":
            own.add(Problem(seq, "", f"rank {rank.rank} voted {rank.vote}: {rank.error}"))
        lost = set[int]()
        for index, pack in enumerate(rank.packs):
            self.objects += 1
            if sizes.get(pack.key) != pack.size:  # a resume refuses it, whatever it would read of it
                lost.add(index)
                what = f"has {sizes[pack.key]} bytes instead of {pack.size}" if pack.key in sizes else "missing"
                own.add(Problem(seq, pack.key, what))
                continue
            for problem in self._header(seq, rank, pack.key):  # a resume reads by the rank manifest, and no header
                own.add(problem, rows=False, state=False)
        if self._deep:
            for spans, of_rows in ((_row_spans(rank), True), (_state_spans(rank), False)):
                for span in spans:
                    if span.pack in lost:
                        continue
                    self.bytes_read += span.size
                    self._report()
                    try:
                        read_span(self._repository, rank, span)
                    except CheckpointError as error:
                        problem = _problem(seq, rank.packs[span.pack].key, error)
                        own.add(problem, rows=of_rows, state=not of_rows)

    def _header(self, seq: int, rank: RankManifest, key: str) -> list[Problem]:
        index, pack = next((i, p) for i, p in enumerate(rank.packs) if p.key == key)
        raw = self._repository.store.get(key, 0, pack.header_size)
        self.bytes_read += len(raw)
        if checksum(raw) != pack.header_checksum:
            return [Problem(seq, key, "the header is not what was written (its tensors may still be whole)")]
        tensors = read_header(raw, key, pack.size)
        return [
            Problem(seq, key, f"tensor {span.tensor!r} is not where the rank manifest says")
            for span in (*_row_spans(rank), *_state_spans(rank))
            if span.pack == index and (span.tensor not in tensors or tensors[span.tensor][2:] != (span.begin, span.end))
        ]

    def coverage(self, links: list[Link]) -> list[Problem]:
        """Tables whose rows no checkpoint of the chain carries.

        A delta on a chain that covers the same tables needs no look at rows: checking n deltas in a row takes n steps.
        """
        begin = links[0].tables.digest
        for end, link in enumerate(links, 1):
            chain = (begin, link.manifest.digest)
            if chain not in self._uncovered:
                inherits = end > 1 and self._layouts[link.tables.digest] == self._layouts[links[end - 2].tables.digest]
                before = self._uncovered[begin, links[end - 2].manifest.digest] if inherits else []
                self._uncovered[chain] = before or ([] if inherits else self._missing_rows(links[:end]))
        return self._uncovered[begin, links[-1].manifest.digest]

    def _ranks(self, manifest: Manifest) -> list[RankManifest]:
        if self._base is not None and self._base[0] == manifest.digest:
            return self._base[1]
        return self._repository.rank_manifests(manifest)

    def _missing_rows(self, links: list[Link]) -> list[Problem]:
        newest = links[-1].manifest.seq
        try:
            ranks = [self._ranks(link.tables) for link in links]
            self._base = None  # a delta of other shards is the one case in which they are read again
            check_backing(self._repository, ranks)
        except CheckpointError as error:
            return [_problem(newest, "", error)]
        problems = []
        shards = {(s.shard.table, s.shard.col_start): s.shard for rank in ranks[-1] for s in rank.shards}
        found = ChainShards(ranks)
        for shard in shards.values():
            chain = TableChain(self._repository, found, shard.table)
            cols = range(shard.col_start, shard.col_start + shard.cols)
            for each in shard.fields:
                try:
                    chain.plan(each.name, range(shard.table_rows), cols)
                except CheckpointError as error:
                    problems.append(_problem(newest, "", error))
        return problems


def _parts(rank: RankManifest) -> set[_Part]:
    return {
        (s.shard.table, s.shard.table_rows, s.shard.table_cols, s.shard.col_start, s.shard.cols, s.shard.fields)
        for s in rank.shards
    }


def _row_spans(rank: RankManifest) -> list[Span]:
    return [r.at for s in rank.shards for r in s.rowsets] + [e.at for s in rank.shards for e in s.entries]


def _state_spans(rank: RankManifest) -> list[Span]:
    return [t.at for s in rank.state for t in s.tensors]


def _problem(seq: int, key: str, error: CheckpointError) -> Problem:
    """What an error says of an object. A store that does not answer says nothing: then the error itself goes on."""
    if isinstance(error, StorageError) and error.retryable:
        raise error
    named = key_of(error) or key
    parsed = layout.parse_key(named)
    if isinstance(error, NotFoundError) and parsed is not None and parsed.what == "manifest":
        return Problem(seq, named, _LOST)
    return Problem(seq, named, str(error), isinstance(error, FormatError))


def check_repository(repository: Repository, *, deep: bool, progress: Progress | None = None) -> CheckReport:
    """See Repository.check.

    Raises:
        StorageError: the store does not answer, or compactions and prunes overtook every pass.
        TypeError: ``deep`` is not True or False.
    """
    flag("deep", deep)
    check = _Check(repository, deep, progress)
    before: frozenset[Problem] = frozenset()
    for _ in range(_PASSES):
        listing = repository.listing()
        report = check.run(listing)
        if report.ok:
            return report
        now = repository.listing()
        if (now.gone, now.bases) == (listing.gone, listing.bases):
            return report
        # A prune or a compaction passed while we looked: what was missed may be what it took. What is missed again by
        # a pass that began after it is lost.
        if before.issuperset(report.problems):
            return report
        before = frozenset(report.problems)
    raise StorageError(
        f"{_PASSES} times a compaction or a prune of {repository.store.url} has passed while this check was reading: "
        "what it missed may be what they took. Check again; end what compacts and prunes there until then",
        retryable=True,
    )
