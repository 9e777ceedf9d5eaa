"""How ranks meet: one broadcast on the main thread, nothing else.

It must not know what is told. Runs of several processes are refused until every part of the protocol is there for them.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch.distributed as dist

from incremental_ckpt.errors import MismatchError

T = TypeVar("T")


class Coordinator(Protocol):
    """The ranks of a job. All calls are collective and from the main thread."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def broadcast(self, value: T) -> T:
        """Rank 0's value on every rank."""


class SingleProcess:
    """A job of one process."""

    rank = 0
    world_size = 1

    def broadcast(self, value: T) -> T:
        return value


def coordinator() -> Coordinator:
    """The coordinator of this process.

    Raises:
        MismatchError: torch.distributed runs with several processes, which this version cannot save.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise MismatchError(
            f"this job has {dist.get_world_size()} ranks; this version of incremental_ckpt saves jobs of one process "
            "only. "
            "Nothing was written. Start it with one process"
        )
    return SingleProcess()
