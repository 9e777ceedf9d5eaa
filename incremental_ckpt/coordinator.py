"""How the ranks of a job meet: on the main thread, at a step boundary, each with a report that all of them then know.

It must not know what the reports say. There is no collective in it, so a rank that does not come is known by name after
a timeout.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

# Not public, but the only way to the store by which init_process_group brought the ranks together.
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from incremental_ckpt.errors import SaveError

_MOST_GRACE_SECONDS = 15.0
"""How much longer a rank waits for rank 0, which may come as late as others do and then waits for them."""


class Coordinator(Protocol):
    """The ranks of a job."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def meet(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's report (plain JSON), in order of ranks, on every rank.

        Raises:
            SaveError: naming the ranks that did not come in time; on every rank that did.
        """


class SingleProcess:
    """A job of one process."""

    rank = 0
    world_size = 1

    def meet(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        return [report]


class RendezvousStore:
    """The ranks of torch.distributed's default group, meeting in the key-value store through which they found each
    other.

    Every rank puts its report; rank 0 collects them and puts what all may know, equal reports once: hundreds of ranks
    mostly say the same. A gloo group would not do: a receive that times out closes the connections to all ranks, so
    nobody could be told who is missing.

    Args:
        timeout: how long to wait for a rank, in seconds.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._patience = 2 * timeout + min(timeout, _MOST_GRACE_SECONDS)
        self._store = PrefixStore("incremental_ckpt", _get_default_store())
        # Checkpointers are made in the same order on every rank, so the count names the same one everywhere.
        self._name = str(next(_made))
        self._meetings = 0
        self._uncleared: list[int] = []
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def meet(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        self._meetings += 1
        try:
            self._store.set(self._key(self.rank), _written(report))
            if self.rank == 0:
                self._collect()
            told = self._get("all", self._patience)
        except RuntimeError as error:
            raise SaveError(self._no_answer(error)) from error
        if told["missing"]:
            names = ", ".join(map(str, told["missing"]))
            raise SaveError(
                f"ranks that did not come to the meeting within {self._timeout:g} s: {names} (of {self.world_size}; "
                f"this is rank {self.rank}). Are they alive, and do all ranks call step() or save_checkpoint() at the "
                "same steps? Nothing was saved"
            )
        distinct: list[dict[str, Any]] = told["distinct"]
        return [distinct[place] for place in told["reports"]]

    def _no_answer(self, error: Exception) -> str:
        if self.rank == 0 or isinstance(error, dist.DistNetworkError):
            return (
                f"rank {self.rank} has lost the store of torch.distributed, which rank 0 or the launcher keeps: {error}"
                ". Is that process alive? Nothing was saved"
            )
        return (  # torch's own words name a key, which says no more
            f"rank {self.rank} waited in vain for rank 0 (at most {self._patience:g} s). Is it alive, and does it call "
            "step() or save_checkpoint() at the same steps? Nothing was saved"
        )

    def _collect(self) -> None:
        deadline = time.monotonic() + self._timeout
        reports, missing = [], []
        for rank in range(self.world_size):
            try:
                reports.append(self._get(rank, max(0.01, deadline - time.monotonic())))
            except RuntimeError:
                missing.append(rank)
        distinct, places = ([], []) if missing else _deduplicated(reports)
        self._store.set(self._key("all"), _written({"missing": missing, "distinct": distinct, "reports": places}))
        if not missing:
            # Whoever is here has read the answers of all meetings before. A late rank still has to read its own.
            for meeting in self._uncleared:
                for old in (*range(self.world_size), "all"):
                    self._store.delete_key(self._key(old, meeting))
            self._uncleared = []
        self._uncleared.append(self._meetings)

    def _get(self, who: int | str, timeout: float) -> dict[str, Any]:
        self._store.wait([self._key(who)], timedelta(seconds=timeout))
        found: dict[str, Any] = json.loads(self._store.get(self._key(who)))
        return found

    def _key(self, who: int | str, meeting: int | None = None) -> str:
        return f"{self._name}/{self._meetings if meeting is None else meeting}/{who}"


_made = itertools.count()


def _deduplicated(reports: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """The different reports, and for each rank which of them is its own."""
    distinct: list[dict[str, Any]] = []
    known: dict[str, int] = {}
    places = []
    for report in reports:
        place = known.setdefault(_written(report), len(distinct))
        if place == len(distinct):
            distinct.append(report)
        places.append(place)
    return distinct, places


def _written(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def coordinator(timeout: float) -> Coordinator:
    """The coordinator of this process: torch.distributed's ranks if it is initialised with several of them.

    Raises:
        ValueError: the launcher has started several ranks, and they are not connected; or it gives no number of them.
    """
    if dist.is_available() and dist.is_initialized():
        return RendezvousStore(timeout) if dist.get_world_size() > 1 else SingleProcess()
    told = os.environ.get("WORLD_SIZE", "1")
    if told != "1" and "RANK" in os.environ:
        if not told.isdecimal() or int(told) < 1:
            raise ValueError(f"the launcher says that there are {told} ranks (WORLD_SIZE), and a job has 1 or more")
        raise ValueError(
            f"the launcher says that there are {told} ranks (WORLD_SIZE), and torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() before you make a Checkpointer, or every rank would save as "
            "a job of its own"
        )
    return SingleProcess()
