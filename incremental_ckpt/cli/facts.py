"""What the verbs report, read from a repository: dataclasses that are also the JSON contract.

It must not know how they are drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from incremental_ckpt.cli.catalogue import checkpoint_json
from incremental_ckpt.errors import CheckpointError, CorruptionError, FormatError, NotFoundError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Manifest, RankManifest, ShardEntries, Span
from incremental_ckpt.model import WEIGHT, CheckpointInfo, Field, Kind
from incremental_ckpt.repository import CheckReport, Link, Repository
from incremental_ckpt.repository.chain import walk

_PASSES = 3
_UNREADABLE = (CorruptionError, FormatError, NotFoundError)
"""What a damaged or missing object raises, and one of a newer version."""


@dataclass(frozen=True)
class ChainLink:
    """A checkpoint that a resume replays; ``compacted``: its tables are read from an equivalent base."""

    seq: int
    step: int
    kind: Kind
    rows: int
    bytes: int
    created: datetime
    compacted: bool


@dataclass(frozen=True)
class FieldFacts:
    """One field of a table; ``codecs`` are those of the records that this checkpoint carries."""

    name: str
    dtype: str
    width: int
    codecs: tuple[str, ...]


@dataclass(frozen=True)
class TableFacts:
    """One table as a checkpoint carries it.

    Attributes:
        rows, cols: its shape.
        shards: the parts that it is saved in, over all ranks.
        replicated: every rank holds all of it, and each carries other rows.
        rows_carried: rows in this checkpoint.
        bytes: their records and row ids in the packs.
    """

    name: str
    rows: int
    cols: int
    shards: int
    replicated: bool
    fields: tuple[FieldFacts, ...]
    rows_carried: int
    bytes: int


@dataclass(frozen=True)
class StateFacts:
    """State that is not rows, by name; tensors and bytes over all ranks that hold it."""

    name: str
    ranks: int
    tensors: int
    bytes: int


@dataclass(frozen=True)
class FactsProblem:
    """A manifest that cannot be read, of the checkpoint itself or of one that it is read from; ``error`` says why."""

    seq: int
    key: str
    what: str
    error: CheckpointError


@dataclass(frozen=True)
class CheckpointFacts:
    """Everything that the manifests say of one checkpoint.

    Attributes:
        equivalent_bytes: the size of the equivalent base beside it, None where there is none.
        chain: what a resume replays, without damaged equivalents; from where it can be read on.
        chain_is_whole: it begins with a base.
        problems: what could not be read; tables and state of such objects are not among these facts.
    """

    checkpoint: CheckpointInfo
    equivalent_bytes: int | None
    digest: str
    chain: tuple[ChainLink, ...]
    tables: tuple[TableFacts, ...]
    state: tuple[StateFacts, ...]
    environment: Mapping[str, Any]
    chain_is_whole: bool = True
    problems: tuple[FactsProblem, ...] = ()


def checkpoint_facts(repository: Repository, seq: int | None) -> CheckpointFacts:
    """The facts of a checkpoint (None: the newest), as far as they can be read.

    Raises:
        NotFoundError: there is none.
        CorruptionError, FormatError: its own manifest is damaged, missing, or of a newer version.
    """
    wanted = repository.resolve(seq)
    for _ in range(_PASSES):
        listing = repository.listing()
        try:
            found = repository.retried(lambda: _facts(repository, wanted))
        except CorruptionError:
            repository.resolve(wanted)  # a prune may have passed: then it is not damaged, but gone
            raise
        now = repository.listing()
        if not found.problems or (now.gone, now.bases) == (listing.gone, listing.bases):
            break
        repository.resolve(wanted)
    return found


def _facts(repository: Repository, seq: int) -> CheckpointFacts:
    manifest = repository.manifest(seq)
    problems: list[FactsProblem] = []
    links = _links(repository, manifest, problems)
    ranks = []
    for ref in manifest.ranks:
        try:
            ranks.append(repository.rank_manifest(ref))
        except _UNREADABLE as error:
            problems.append(_problem(seq, ref.key, error))
    return CheckpointFacts(
        manifest.info(),
        links[-1].tables.totals.bytes if links[-1].tables is not manifest else None,
        manifest.digest,
        tuple(_chain_link(link) for link in links),
        _tables(ranks),
        _state(ranks),
        manifest.environment,
        links[0].tables.kind == "base",
        tuple(problems),
    )


def _links(repository: Repository, manifest: Manifest, problems: list[FactsProblem]) -> list[Link]:
    """The chain, past equivalents that cannot be read, as a resume goes; down to a base or as far as it can be read."""

    def unread(seq: int, error: CheckpointError) -> None:
        problems.append(_problem(seq, layout.base_key(seq), error))

    links: list[Link] = []
    try:
        for link in walk(repository, manifest, repository.listing().bases, unread):
            links.append(link)
    except _UNREADABLE as error:
        parent = links[-1].manifest.parent
        assert parent is not None, "a base ends the walk"
        problems.append(_problem(parent.seq, layout.manifest_key(parent.seq), error))
    return links[::-1]


def _problem(seq: int, key: str, error: CheckpointError) -> FactsProblem:
    if isinstance(error, NotFoundError):
        error = CorruptionError(f"{key} is missing", key=key)
    return FactsProblem(seq, key, str(error), error)


def _chain_link(link: Link) -> ChainLink:
    info = link.manifest.info()
    compacted = link.tables is not link.manifest
    totals = link.tables.totals
    return ChainLink(info.seq, info.step, info.kind, totals.rows, totals.bytes, info.created, compacted)


def _tables(ranks: Sequence[RankManifest]) -> tuple[TableFacts, ...]:
    found: dict[str, TableFacts] = {}
    for part in (part for rank in ranks for part in rank.shards):
        shard = part.shard
        before = found.get(shard.table) or TableFacts(
            shard.table, shard.table_rows, shard.table_cols, 0, part.replicated, (), 0, 0
        )
        # Column shards carry the same rows. Rows that a later entry overrides are no further rows, and raw ones beside
        # quantized records neither.
        weights = [entry for entry in part.entries if entry.field == WEIGHT]
        quantized = [entry for entry in weights if entry.codec != "raw"]
        carried = sum(part.row_count(entry) for entry in quantized or weights)
        found[shard.table] = dataclasses.replace(
            before,
            shards=before.shards + 1,
            fields=_merged(before.fields, shard.fields, {(entry.field, entry.codec) for entry in part.entries}),
            rows_carried=before.rows_carried + (min(carried, shard.rows) if shard.col_start == 0 else 0),
            bytes=before.bytes + sum(at.size for at in _spans(part)),
        )
    return tuple(found[name] for name in sorted(found))


def _spans(part: ShardEntries) -> list[Span]:
    return [rowset.at for rowset in part.rowsets] + [entry.at for entry in part.entries]


def _merged(
    before: Sequence[FieldFacts], fields: Sequence[Field], used: set[tuple[str, str]]
) -> tuple[FieldFacts, ...]:
    known = {field.name: field for field in before}
    merged = []
    for field in fields:
        codecs = {codec for name, codec in used if name == field.name}
        earlier = known.get(field.name)
        # A per-column state is as wide as its shard: the widest shard's stands for all of a column-wise table.
        width = max(field.width, earlier.width if earlier else 0)
        codecs |= set(earlier.codecs) if earlier else set()
        merged.append(FieldFacts(field.name, field.dtype, width, tuple(sorted(codecs))))
    return tuple(merged)


def _state(ranks: Sequence[RankManifest]) -> tuple[StateFacts, ...]:
    found: dict[str, StateFacts] = {}
    for state in (state for rank in ranks for state in rank.state):
        before = found.get(state.name) or StateFacts(state.name, 0, 0, 0)
        # Tied tensors share their bytes.
        spans = {(tensor.at.pack, tensor.at.begin, tensor.at.end) for tensor in state.tensors}
        found[state.name] = StateFacts(
            state.name,
            before.ranks + 1,
            before.tensors + len(state.tensors),
            before.bytes + sum(end - begin for _, begin, end in spans),
        )
    return tuple(found[name] for name in sorted(found))


@dataclass(frozen=True)
class CheckFacts:
    """A check's report and what it means for the next resume.

    Attributes:
        resumes: the checkpoint that a resume without a step takes, None where it finds none, or asks for an upgrade.
        passed_over: visible checkpoints above ``resumes`` that it passes over.
        asks_for_upgrade: it finds none, since only a newer version can read the newest.
    """

    report: CheckReport
    deep: bool
    resumes: CheckpointInfo | None
    passed_over: tuple[int, ...]
    asks_for_upgrade: bool


def check_facts(repository: Repository, report: CheckReport, *, deep: bool) -> CheckFacts:
    checked = sorted((*report.restorable, *report.damaged))
    resumed: Manifest | None = None
    asks_for_upgrade = False
    newer = {problem.seq for problem in report.problems if problem.newer}
    if checked and checked[-1] in report.restorable:
        resumed = repository.manifest(checked[-1])
    elif checked and _stands_on(repository, checked[-1], newer):
        asks_for_upgrade = True
    elif checked:
        candidates = repository.fallbacks(checked[-1], repository.listing())
        try:
            resumed = next((m for m in candidates if m.seq in report.restorable), None)
        except FormatError:
            asks_for_upgrade = True
    passed_over = tuple(seq for seq in checked if resumed is None or seq > resumed.seq)
    return CheckFacts(report, deep, resumed.info() if resumed else None, passed_over, asks_for_upgrade)


def _stands_on(repository: Repository, seq: int, seqs: Collection[int]) -> bool:
    """Whether a checkpoint is among these, or is read from one that is."""
    try:
        return any(link.manifest.seq in seqs for link in walk(repository, repository.manifest(seq), ()))
    except _UNREADABLE as error:
        return isinstance(error, FormatError)


def facts_json(facts: CheckpointFacts) -> dict[str, Any]:
    rest = {
        "digest": facts.digest,
        "chain": [dataclasses.asdict(link) for link in facts.chain],
        "tables": [dataclasses.asdict(table) for table in facts.tables],
        "state": [dataclasses.asdict(state) for state in facts.state],
        "environment": facts.environment,
        "problems": [{"seq": each.seq, "key": each.key, "what": each.what} for each in facts.problems],
    }
    return checkpoint_json(facts.checkpoint, facts.equivalent_bytes) | rest


def check_json(facts: CheckFacts) -> dict[str, Any]:
    report = facts.report
    return {
        "ok": report.ok,
        "deep": facts.deep,
        "checkpoints": report.checkpoints,
        "restorable": report.restorable,
        "damaged": report.damaged,
        "lost": report.lost,
        "resumes": facts.resumes.seq if facts.resumes else None,
        "problems": [dataclasses.asdict(problem) for problem in report.problems],
        "objects": report.objects,
        "bytes_read": report.bytes_read,
    }
