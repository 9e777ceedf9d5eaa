"""Looks after a run's store after each commit: prunes by the policies that say what to keep, begins compactions.

It must not know ranks or threads: it is called where nothing waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from incremental_ckpt.compaction.beside import Compactions
from incremental_ckpt.errors import CheckpointError
from incremental_ckpt.events import PruneEvent
from incremental_ckpt.format.manifest import Lineage
from incremental_ckpt.model import CheckpointInfo
from incremental_ckpt.policy import Keep
from incremental_ckpt.pruning import prune
from incremental_ckpt.repository import Repository

log = logging.getLogger("incremental_ckpt")


@dataclass(frozen=True)
class _BeforeRun:
    """Whoever begins anew on a store with checkpoints may have forgotten to resume: what a run found there when it
    began is not its own to forget. `ickpt prune` may."""

    lineage: Sequence[Lineage]

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        first = max((entry.first for entry in self.lineage if entry.resumed == 0), default=1)
        return frozenset(info.seq for info in checkpoints if info.seq < first)


class Retention:
    """What is kept is decided from the store each time, so nothing has to be remembered over a restart.

    Args:
        keep: nothing is pruned where no policy says what to keep.
        compactions: None: no chain is compacted.
    """

    def __init__(self, repository: Repository, keep: Sequence[Keep], compactions: Compactions | None = None) -> None:
        self._repository = repository
        self._keep = keep
        self._compactions = compactions

    def run(self, step: int) -> PruneEvent | None:
        if self._compactions is not None:
            self._compactions.run(step)
        return self._prune(step) if self._keep else None

    def _prune(self, step: int) -> PruneEvent | None:
        """Forget what no policy keeps, after the commit of a step; None where there was nothing to do.

        What cannot be done is told in the event and tried again after the next commit: a prune that fails costs room,
        and no checkpoint.
        """
        try:
            newest = self._repository.newest()
            earlier = _BeforeRun(newest.lineage if newest is not None else ())
            report = prune(self._repository, (*self._keep, earlier), dry_run=False)
        except CheckpointError as failure:
            log.warning("nothing is pruned after step %d: %s (tried again after the next save)", step, failure)
            return PruneEvent(step, (), 0, (str(failure),))
        if not report.forgotten and not report.bytes_freed and not report.failures:
            return None
        return PruneEvent(step, report.forgotten, report.bytes_freed, report.failures)
