"""The keys of all objects of a repository, built and parsed here only (docs/format.md, section 3).

It must not know what the objects contain.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

REPO = "repo.json"
MANIFESTS = "manifests/"
RESUMES = "resumes/"
DATA = "data/"
MAX_NUMBER = 2**63 - 1

What = Literal["repo", "manifest", "base", "gone", "resume", "rank", "pack", "outcome"]

_NUMBER = "[0-9]{1,19}"
_ID = "[0-9a-f]{16}"
_ID_FORM = re.compile(_ID)
_MANIFEST = re.compile(rf"manifests/({_NUMBER})(\.base|\.gone)?\.json")
_RESUME = re.compile(rf"resumes/({_ID})-({_NUMBER})\.json")
_ATTEMPT = re.compile(rf"data/({_NUMBER})-({_ID})/(.+)")
_RANK = re.compile(rf"rank-({_NUMBER})\.json")
_PACK = re.compile(rf"rank-({_NUMBER})-({_NUMBER})\.safetensors")
_MANIFEST_KINDS: dict[str | None, What] = {None: "manifest", ".base": "base", ".gone": "gone"}


@dataclass(frozen=True)
class ParsedKey:
    """What a key names. Numbers and ids that this sort of key does not carry are 0 or empty."""

    what: What
    seq: int = 0
    attempt: str = ""
    rank: int = 0
    index: int = 0
    job: str = ""
    n: int = 0


def manifest_key(seq: int) -> str:
    return f"{MANIFESTS}{_seq(seq)}.json"


def base_key(seq: int) -> str:
    return f"{MANIFESTS}{_seq(seq)}.base.json"


def gone_key(seq: int) -> str:
    return f"{MANIFESTS}{_seq(seq)}.gone.json"


def resume_key(job: str, n: int) -> str:
    return f"{RESUMES}{_id(job, 'job')}-{_number(n, 'resume', 1)}.json"


def attempt_prefix(seq: int, attempt: str) -> str:
    """What the keys of all objects of an attempt begin with."""
    return f"{DATA}{_seq(seq)}-{_id(attempt, 'attempt')}/"


def rank_manifest_key(seq: int, attempt: str, rank: int) -> str:
    return f"{attempt_prefix(seq, attempt)}rank-{_number(rank, 'rank', 5)}.json"


def pack_key(seq: int, attempt: str, rank: int, index: int) -> str:
    return f"{attempt_prefix(seq, attempt)}rank-{_number(rank, 'rank', 5)}-{_number(index, 'pack', 4)}.safetensors"


def outcome_key(seq: int, attempt: str) -> str:
    return f"{attempt_prefix(seq, attempt)}outcome.json"


def parse_key(key: str) -> ParsedKey | None:
    """The exact inverse of the builders; None for a key that none of them builds."""
    parsed = _parse(key)
    return parsed if parsed is not None and _build(parsed) == key else None


def new_id(randbytes: Callable[[int], bytes] = os.urandom) -> str:
    """A name for a job or an attempt: 16 random hex digits, of which the first is not the ``c`` of compactions."""
    name = randbytes(8).hex()
    return name if name[0] != "c" else f"d{name[1:]}"


def _parse(key: str) -> ParsedKey | None:
    if key == REPO:
        return ParsedKey("repo")
    if match := _MANIFEST.fullmatch(key):
        return ParsedKey(_MANIFEST_KINDS[match[2]], seq=int(match[1]))
    if match := _RESUME.fullmatch(key):
        return ParsedKey("resume", job=match[1], n=int(match[2]))
    if not (match := _ATTEMPT.fullmatch(key)):
        return None
    seq, attempt, name = int(match[1]), match[2], match[3]
    if name == "outcome.json":
        return ParsedKey("outcome", seq=seq, attempt=attempt)
    if match := _RANK.fullmatch(name):
        return ParsedKey("rank", seq=seq, attempt=attempt, rank=int(match[1]))
    if match := _PACK.fullmatch(name):
        return ParsedKey("pack", seq=seq, attempt=attempt, rank=int(match[1]), index=int(match[2]))
    return None


def _build(parsed: ParsedKey) -> str | None:
    """The one spelling of a key; None where a number is out of range."""
    try:
        match parsed.what:
            case "repo":
                return REPO
            case "manifest":
                return manifest_key(parsed.seq)
            case "base":
                return base_key(parsed.seq)
            case "gone":
                return gone_key(parsed.seq)
            case "resume":
                return resume_key(parsed.job, parsed.n)
            case "rank":
                return rank_manifest_key(parsed.seq, parsed.attempt, parsed.rank)
            case "pack":
                return pack_key(parsed.seq, parsed.attempt, parsed.rank, parsed.index)
            case "outcome":
                return outcome_key(parsed.seq, parsed.attempt)
    except ValueError:
        return None


def _seq(seq: int) -> str:
    if seq == 0:
        raise ValueError("seq 0 cannot be in a key: checkpoints are numbered from 1")
    return _number(seq, "seq", 8)


def _number(value: int, what: str, digits: int) -> str:
    if not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"{what} {value} cannot be in a key: it must lie between 0 and {MAX_NUMBER}")
    return f"{value:0{digits}d}"


def _id(value: str, what: str) -> str:
    if not _ID_FORM.fullmatch(value):
        raise ValueError(f"{what} {value!r} cannot be in a key: it must be 16 hex digits in lower case (see new_id)")
    return value
