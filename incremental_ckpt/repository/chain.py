"""The chain of a checkpoint down to a base, and reading along it past equivalent bases that are of no use.

It must not know what is read, and must not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from incremental_ckpt.errors import CheckpointError, CorruptionError, FormatError
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Manifest
from incremental_ckpt.repository.foundation import places_of

if TYPE_CHECKING:
    from incremental_ckpt.repository.core import Repository

log = logging.getLogger("incremental_ckpt")

T = TypeVar("T")
Useless = CorruptionError | FormatError
Unread = Callable[[int, Useless], None]
"""Told of an equivalent base that cannot be read: its number, and why."""


@dataclass(frozen=True)
class Link:
    """One checkpoint of a chain.

    Attributes:
        manifest: of the checkpoint itself: its state is read from here.
        tables: the manifest that its tables are read from: the same, or that of an equivalent base.
    """

    manifest: Manifest
    tables: Manifest


def walk(
    repository: Repository, manifest: Manifest, bases: Collection[int], unread: Unread | None = None
) -> Iterator[Link]:
    """The chain of a checkpoint, newest first, each manifest verified against the digest that its child names.

    Args:
        bases: numbers whose equivalent bases are looked for.
        unread: passes over those that cannot be read; None: they are an error.

    Raises:
        CorruptionError: the next manifest is damaged, or not the one that its child names.
        FormatError: it is of a newer version.
        NotFoundError: it is missing.
    """
    while True:
        equivalent: Manifest | None = None
        if manifest.seq in bases:
            try:
                equivalent = repository.equivalent(manifest)
            except (CorruptionError, FormatError) as error:
                if unread is None:
                    raise
                unread(manifest.seq, error)
        yield Link(manifest, equivalent or manifest)
        if equivalent is not None or manifest.kind == "base":
            return
        assert manifest.parent is not None, "a delta has a parent: Manifest.from_bytes checks it"
        parent = repository.manifest(manifest.parent.seq)
        if parent.digest != manifest.parent.digest:
            raise CorruptionError(
                f"seq {manifest.seq} was saved on another checkpoint than the seq {parent.seq} that "
                f"{repository.store.url} holds "
                "(objects of two runs are mixed). Restore the parent from a copy, or resume an ancestor",
                key=layout.manifest_key(parent.seq), expected=manifest.parent.digest, found=parent.digest,
            )  # fmt: skip
        manifest = parent


class Reading:
    """One read along the chains of some checkpoints. What stands in the way of it while it is an equivalent base, is
    passed over for the chain that it stands for, as a resume does.

    Args:
        seqs: of the checkpoints; None: the newest.
    """

    def __init__(self, repository: Repository, seqs: Collection[int | None]) -> None:
        self._repository = repository
        self._seqs = seqs
        self._chains: list[list[Link]] = []
        self._passed_over: dict[int, Useless] = {}

    def run(self, read: Callable[..., T]) -> T:
        """See Repository.read_along."""

        def attempt() -> T:
            self._chains = []
            for seq in self._seqs:
                wanted = self._repository.resolve(seq)
                bases = self._repository.listing().bases - self._passed_over.keys()
                links = walk(self._repository, self._repository.manifest(wanted), bases, self._pass_over)
                self._chains.append([*links][::-1])
            return read(*self._chains)

        while True:
            try:
                return self._repository.retried(attempt, on_missing_checkpoint=False)
            except (CorruptionError, FormatError) as error:
                stood_on = {chain[0].tables.seq: chain[0].tables for chain in self._chains if chain[0].tables.of}
                useless = [seq for seq, base in stood_on.items() if _may_be_in(base, error)]
                if not useless:
                    raise self._last(error) from error
                for seq in useless:
                    self._pass_over(seq, error)

    def _pass_over(self, seq: int, error: Useless) -> None:
        if seq not in self._passed_over:
            log.warning("the equivalent base of seq %d is passed over for the chain that it stands for: %s", seq, error)
            self._passed_over[seq] = error

    def _last(self, error: Useless) -> Useless:
        """What to raise where there is nothing else to read from. An upgrade helps where a newer version wrote."""
        passed = [*self._passed_over.values()]
        first = next((each for each in passed if isinstance(each, FormatError)), passed[0] if passed else None)
        if first is None or key_of(first) == key_of(error) or self._is_above_all_passed_over(error):
            return error
        text = f"{first}. The chain that this equivalent base stands for is not whole either: {error}"
        if isinstance(first, FormatError):
            return FormatError(text)
        return CorruptionError(text, key=first.key, expected=first.expected, found=first.found)

    def _is_above_all_passed_over(self, error: Useless) -> bool:
        """Whether it is of a checkpoint that is read whichever bases are."""
        parsed = layout.parse_key(key_of(error))
        return parsed is not None and parsed.seq > max(self._passed_over)


def _may_be_in(base: Manifest, error: Useless) -> bool:
    """Whether an error may be of a base's objects. One that names no object, as of rows that nobody carries, may."""
    parsed = layout.parse_key(key_of(error))
    return parsed is None or (parsed.seq, parsed.attempt) in places_of(base)


def key_of(error: CheckpointError) -> str:
    """The object that an error is about, "" if it is no single one: of a newer version it begins the message."""
    named = getattr(error, "key", "")
    if named or not isinstance(error, FormatError):
        return named or ""
    first = str(error).partition(" ")[0]
    return first if layout.parse_key(first) is not None else ""
