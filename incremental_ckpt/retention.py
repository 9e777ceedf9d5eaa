"""Looks after a run's store after each commit: prunes by the policies that say what to keep, begins compactions.

It must not know ranks or threads: it is called where nothing waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from incremental_ckpt.compaction.beside import Compactions
from incremental_ckpt.errors import CheckpointError, CorruptionError, NotFoundError
from incremental_ckpt.events import PruneEvent
from incremental_ckpt.format.manifest import Lineage
from incremental_ckpt.model import CheckpointInfo
from incremental_ckpt.policy import Keep, KeepBest
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


def unranked_metrics(repository: Repository, policies: Iterable[Keep], kept: Iterable[int]) -> Mapping[str, str]:
    """Metrics by which ``KeepBest`` can rank none of the kept checkpoints, so that it keeps all, each with a line that
    says so: most often the name is misspelt, or the metric comes with a later save."""
    wanted = {policy.metric: policy for policy in policies if isinstance(policy, KeepBest)}
    infos: list[CheckpointInfo] = []
    for seq in kept if wanted else ():
        with suppress(CorruptionError, NotFoundError):  # the plan tells of those
            infos.append(repository.manifest(seq).info())
    known = {name for info in infos for name in info.metrics}
    others = ", ".join(sorted(known)) or "none"
    found: dict[str, str] = {}
    for name, policy in sorted(wanted.items()) if infos else ():
        values = [policy.value(info) for info in infos]
        if all(value is None for value in values):
            found[name] = f"no checkpoint has the metric {name}, so all are kept until one has it (metrics: {others})"
        elif all(value is None or value != value for value in values):
            found[name] = f"the metric {name} is a number in no checkpoint, so all are kept until it is in one"
    return found


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
        self._told_metrics: set[str] = set()

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
        with suppress(CheckpointError):  # the store does not answer: told after the next save
            self._tell_of_unranked_metrics(report.plan.kept)
        if not report.forgotten and not report.bytes_freed and not report.failures:
            return None
        return PruneEvent(step, report.forgotten, report.bytes_freed, report.failures)

    def _tell_of_unranked_metrics(self, kept: Sequence[int]) -> None:
        """Of each once: a store that grows without end is to be no surprise."""
        untold = [k for k in self._keep if isinstance(k, KeepBest) and k.metric not in self._told_metrics]
        for name, line in unranked_metrics(self._repository, untold, kept).items():
            self._told_metrics.add(name)
            log.warning("keep: %s", line)
