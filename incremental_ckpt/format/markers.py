"""Small documents beside the manifests: resume markers, outcomes, gone files and repo.json (docs/format.md, 4 and 5).

It must not know stores, nor decide what the documents mean together.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from incremental_ckpt.format.documents import read_document, write_document
from incremental_ckpt.format.layout import REPO, gone_key, outcome_key, resume_key
from incremental_ckpt.format.members import MalformedError, Members, UnsupportedError, written_time
from incremental_ckpt.format.sealed import FORMAT

FEATURES: frozenset[str] = frozenset()
"""The features that this version knows."""


@dataclass(frozen=True)
class Resume:
    """The job's n-th resume was from ``seq``, when ``newest`` was the newest."""

    job: str
    n: int
    seq: int
    newest: int
    created: datetime

    @property
    def key(self) -> str:
        return resume_key(self.job, self.n)

    def to_bytes(self) -> bytes:
        members = {
            "job": self.job,
            "n": self.n,
            "seq": self.seq,
            "newest": self.newest,
            "created": written_time(self.created),
        }
        return write_document(members, _resume)

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, key: str) -> Resume:
        return read_document(raw, key, _resume)


@dataclass(frozen=True)
class Outcome:
    """Rank 0's word on an attempt: committed, or failed and why."""

    seq: int
    attempt: str
    committed: bool
    error: str

    @property
    def key(self) -> str:
        return outcome_key(self.seq, self.attempt)

    def to_bytes(self) -> bytes:
        members = {"seq": self.seq, "attempt": self.attempt, "committed": self.committed, "error": self.error}
        return write_document(members, _outcome)

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, key: str) -> Outcome:
        return read_document(raw, key, _outcome)


@dataclass(frozen=True)
class Gone:
    """The checkpoint ``seq`` is forgotten."""

    seq: int
    created: datetime

    @property
    def key(self) -> str:
        return gone_key(self.seq)

    def to_bytes(self) -> bytes:
        return write_document({"seq": self.seq, "created": written_time(self.created)}, _gone)

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, key: str) -> Gone:
        return read_document(raw, key, _gone)


@dataclass(frozen=True)
class RepoFile:
    """The format and the features that a reader of this repository must know."""

    format: int
    features: tuple[str, ...]

    @property
    def key(self) -> str:
        return REPO

    def to_bytes(self) -> bytes:
        if self.format != FORMAT:
            raise ValueError(f"this version writes format {FORMAT}, not {self.format}")
        return write_document({"features": list(self.features)}, _repo_file)

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview, key: str) -> RepoFile:
        """Raises FormatError for a format or a feature that this version does not know."""
        return read_document(raw, key, _repo_file)


def _resume(members: Members) -> Resume:
    newest = members.integer("newest", 1)
    return Resume(
        job=members.hexadecimal("job", 16),
        n=members.integer("n"),
        seq=members.integer("seq", 0, newest),
        newest=newest,
        created=members.time("created"),
    )


def _outcome(members: Members) -> Outcome:
    return Outcome(
        seq=members.integer("seq", 1),
        attempt=members.hexadecimal("attempt", 16),
        committed=members.boolean("committed"),
        error=members.text("error"),
    )


def _gone(members: Members) -> Gone:
    return Gone(members.integer("seq", 1), members.time("created"))


def _repo_file(members: Members) -> RepoFile:
    features = members.items("features")
    for feature in features:
        if not isinstance(feature, str):
            raise MalformedError("features has a member that is not a string")
        if feature not in FEATURES:
            raise UnsupportedError(
                f"the repository uses the feature {feature[:80]!r}, which this version does not know"
            )
    return RepoFile(members.integer("format", 1, FORMAT), tuple(features))
