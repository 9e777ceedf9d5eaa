"""Looks after a run's store after each commit: prunes by the policies that say what to keep, begins compactions.

It must not know ranks or threads: it is called where nothing waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from incremental_ckpt.compaction.beside import Compactions
from incremental_ckpt.errors import CheckpointError
from incremental_ckpt.events import PruneEvent
from incremental_ckpt.policy import Keep
from incremental_ckpt.pruning import prune
from incremental_ckpt.repository import Repository

log = logging.getLogger("incremental_ckpt")


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
            report = prune(self._repository, self._keep, dry_run=False)
        except CheckpointError as failure:
            log.warning("nothing is pruned after step %d: %s (tried again after the next save)", step, failure)
            return PruneEvent(step, (), 0, (str(failure),))
        if not report.forgotten and not report.bytes_freed and not report.failures:
            return None
        return PruneEvent(step, report.forgotten, report.bytes_freed, report.failures)
