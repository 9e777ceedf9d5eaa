"""Plain data that tunes a Checkpointer: sizes, threads, time limits.

It must not hold components (stores, codecs, policies): those are arguments of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_type_hints

MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes, times in seconds.

    Attributes:
        pack_bytes: packs are at most about this large; also the size of the buffer through which a base is streamed.
        entry_bytes: the records of one field are cut into entries of at most about this size, the unit of checksums and
            of partial reads.
        snapshot_bytes: changed rows are copied within the stall up to this many bytes; more are streamed like a base.
        preimage_bytes: while rows are streamed, at most this many bytes of old values of changing rows are held in
            memory; they are spilled to packs at half of it, and training waits for the spill at all of it.
        stream: False copies all rows of a base within the stall instead (one more copy of the model in host memory).
        read_threads: parallel reads of a resume.
        vote_timeout: how long rank 0 waits for the other ranks' votes, and they for its outcome.
        drain_timeout: how long ``close``, a resume and a save wait for the save before.
        grace_seconds: after SIGTERM, ``step`` makes one last save and ends the process (SystemExit 143), at most so
            long after the signal; 0 leaves the signal alone. See docs/policies.md.
        chain_length: a chain has at most so many checkpoints, the base included: the next one is a base; None: no
            limit.
        chain_bytes: likewise, what a resume may have to read, foretold by the size of the last delta; None: no limit.
        compact_after: where a chain has at least so many deltas, its newest checkpoint is compacted while training goes
            on, in a process of its own; None: never. The store must be given as a path or URL. See docs/policies.md.
        low_priority: the background is the last in line for a core, but does get its turn (Linux: nice 19).
    """

    pack_bytes: int = 32 * MIB
    entry_bytes: int = 8 * MIB
    snapshot_bytes: int = 1 << 30
    preimage_bytes: int = 128 * MIB
    stream: bool = True
    read_threads: int = 4
    vote_timeout: float = 600.0
    drain_timeout: float = 3600.0
    grace_seconds: float = 30.0
    chain_length: int | None = 100
    chain_bytes: int | None = None
    compact_after: int | None = None
    low_priority: bool = True

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            allowed = float | int if kind is float else kind
            if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
                raise TypeError(f"Settings.{name} takes {_name(kind)}, not {value!r}")
        for name in ("vote_timeout", "drain_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Settings.{name} must be more than 0 seconds, not {getattr(self, name)}")
        for name in ("pack_bytes", "entry_bytes", "snapshot_bytes", "preimage_bytes", "read_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"Settings.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("chain_length", "chain_bytes", "compact_after"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"Settings.{name} must be at least 1 or None, not {getattr(self, name)}")
        if not 0 <= self.grace_seconds < float("inf"):
            raise ValueError(f"Settings.grace_seconds must be 0 or more, not {self.grace_seconds}")


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
