"""How long a resume takes, for chains of several lengths and after a compaction, against torch.distributed.checkpoint.

It must not know how a chain is replayed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from plan import Plan
from rows import Row, Target, quartiles, ratio_row
from saving import BASE, DELTA
from timing import rounds_of, seconds_of
from workload import Training

from incremental_ckpt import Checkpointer, EverySteps, ResumeEvent, Settings
from incremental_ckpt.adapters import adapt
from incremental_ckpt.compaction import compact
from incremental_ckpt.events import Event
from incremental_ckpt.repository import Repository
from incremental_ckpt.storage import open_store

_NEVER = EverySteps(1 << 40)
_BLOCK = 16 << 20
_AIMED_AT = 20
"""Deltas for which there are targets."""


@dataclass(frozen=True)
class Chains:
    """Which chains are resumed.

    Attributes:
        deltas: how many follow the base; one chain serves for all, cut off at a step.
        share: of the rows that a delta carries, drawn anew for each.
        codec: of the weights; the optimizer's rows stay raw.
    """

    deltas: Sequence[int]
    share: float
    codec: str


def measure_resume(plan: Plan, chains: Chains) -> list[Row]:
    """Each round resumes every chain and loads the peer's checkpoint, all of it in the page cache."""
    training = plan.training
    lengths = sorted(set(chains.deltas))
    with peer_checkpoint(training, plan.folder / "dcp") as peer, _Run(training, plan.folder / "run", chains) as run:
        run.save_chain(lengths[-1])
        peer_bytes = warm(plan.folder / "dcp")
        warm(plan.folder / "run")
        peer()
        run.resume(lengths[-1])
        rounds = rounds_of(lambda: ([run.resume(n) for n in lengths], peer()), plan.repeats, plan.budget)
        common = {"codec": chains.codec, "share": chains.share, "dcp_bytes": peer_bytes}
        rows = []
        for index, n in enumerate(lengths):
            told = run.told[n]
            rows.append(
                ratio_row(
                    "resume",
                    f"resume of a base and {n} {'delta' if n == 1 else 'deltas'} / dcp.load",
                    [(resumed[index], loaded) for resumed, loaded in rounds],
                    Target("at most", 1.3) if n == _AIMED_AT and chains.codec == "raw" else None,
                    resume_seconds=quartiles([resumed[index] for resumed, _ in rounds])[1],
                    dcp_load_seconds=quartiles([loaded for _, loaded in rounds])[1],
                    named_bytes=told.bytes,
                    **common,
                )
            )
        run.compact()
        warm(plan.folder / "run")
        run.resume(lengths[-1])
        assert run.told[lengths[-1]].chain_length == 1
        rounds_after = rounds_of(lambda: (run.resume(lengths[-1]), peer()), plan.repeats, plan.budget)
        rows.append(
            ratio_row(
                "resume",
                f"resume of a base and {lengths[-1]} deltas, compacted / dcp.load",
                rounds_after,
                Target("at most", 1.1) if chains.codec == "raw" else None,
                resume_seconds=quartiles([resumed for resumed, _ in rounds_after])[1],
                dcp_load_seconds=quartiles([loaded for _, loaded in rounds_after])[1],
                named_bytes=run.told[lengths[-1]].bytes,
                **common,
            )
        )
    return rows


@dataclass
class _Run:
    """A chain in a folder that is removed at the end."""

    training: Training
    folder: Path
    chains: Chains
    told: dict[int, ResumeEvent] = field(default_factory=dict)

    def __enter__(self) -> _Run:
        self._checkpointer = Checkpointer(
            self.training.model, self.folder, optimizer=self.training.optimizer, when=_NEVER, codec=self.chains.codec,
            on_event=self._keep, settings=Settings(chain_length=None),
        )  # fmt: skip
        self._digest = ""
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def save_chain(self, deltas: int) -> None:
        """The steps of its checkpoints are 0 to ``deltas``."""
        random = np.random.default_rng(0)
        self.training.step()
        self._checkpointer.save_checkpoint(0, kind=BASE).wait()
        for step in range(1, deltas + 1):
            self._change_rows(random)
            self._checkpointer.save_checkpoint(step, kind=DELTA).wait()
        self._digest = self._digest_of_tables()

    def resume(self, step: int) -> float:
        """Seconds until everything is back.

        Raises:
            AssertionError: the last of the chain is not what was saved.
        """
        seconds = seconds_of(lambda: self._checkpointer.resume_from_checkpoint(step))
        if self.chains.codec == "raw" and step == max(self.chains.deltas):
            assert self._digest_of_tables() == self._digest, "the resume has not given back what was saved"
        return seconds

    def compact(self) -> None:
        report = compact(Repository(open_store(self.folder)))
        assert report.complete

    def _change_rows(self, random: np.random.Generator) -> None:
        """Mark the share of each table's rows as an update would, and change their values, without a training step."""
        checkpointer = self._checkpointer
        for index, table in enumerate(checkpointer._adapter.tables()):
            rows = table.shard.rows
            ids = torch.from_numpy(random.choice(rows, round(self.chains.share * rows), replace=False, shuffle=False))
            if ids.numel():
                checkpointer._tracker.mark(index, ids)
                for live in table.tensors.values():
                    live.detach()[ids] += 0.25

    def _digest_of_tables(self) -> str:
        state = xxhash.xxh3_64()
        for table in adapt(self.training.model, self.training.optimizer).tables():
            for live in table.tensors.values():
                state.update(live.detach().numpy())
        return state.hexdigest()

    def _keep(self, event: Event) -> None:
        if isinstance(event, ResumeEvent):
            self.told[event.step] = event


class Peer:
    """A checkpoint of torch.distributed.checkpoint: tables as DTensor, dense parameters, both optimizers."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training = training
        self._folder = folder

    def save(self) -> float:
        """Seconds. What was there is removed before."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.sync()
        state = self._state()
        return seconds_of(lambda: dcp.save(state, checkpoint_id=self._folder))

    def load(self) -> float:
        """Seconds of reading everything into the live tensors."""
        state = self._state()
        return seconds_of(lambda: dcp.load(state, checkpoint_id=self._folder))

    def _state(self) -> dict[str, Any]:
        return {
            "model": self._training.model.state_dict(),
            "fused": self._training.model.fused_optimizer.state_dict(),
            "optimizer": self._training.optimizer.state_dict(),
        }


@contextmanager
def peer_checkpoint(training: Training, folder: Path) -> Iterator[Any]:
    """Loading one, in seconds; the folder is removed at the end."""
    peer = Peer(training, folder)
    try:
        peer.save()
        yield peer.load
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def warm(folder: Path) -> int:
    """Read every file once, so that it is in the page cache. Returns the bytes."""
    block, total = bytearray(_BLOCK), 0
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(block):
                    total += count
    return total
