"""One training of the example's DLRM over Criteo rows, resumed so many times from checkpoints of one codec, and what it
has learned in the end.

It must not know other runs, nor what is concluded from them.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from criteo import Batch, CriteoReader
from digest import digest
from dlrm_model import build_model, make_repeatable, to_torch

from incremental_ckpt import Checkpointer, EverySteps, SaveEvent, Settings
from incremental_ckpt.adapters import adapt
from incremental_ckpt.model import WEIGHT, Table
from incremental_ckpt.storage import MemoryStore

_NEVER = EverySteps(1 << 40)
_SETTINGS = Settings(low_priority=False, chain_length=4)
"""Long chains would only take longer to replay."""
_SHARDING = "table-wise"
"""All tables are fused ones and go through the codec; TorchRec's planner would make the small ones dense."""


@dataclass(frozen=True)
class Wanted:
    """One run.

    Attributes:
        restores: how often the run is interrupted and resumed, at equal distances; 0: it saves as a run of 20 restores
            does, and is never resumed.
        codec: of what the learner quantizes; None: nothing is saved.
    """

    seed: int
    codec: str | None
    restores: int


@dataclass(frozen=True)
class Conditions:
    """What all runs of one result share.

    Attributes:
        train_rows: of the file, from its first row on, each read once.
        held_out_rows: the last ones of the file.
    """

    train_rows: int
    held_out_rows: int
    batch: int
    dim: int
    most_rows_per_table: int
    learning_rate: float

    @property
    def steps(self) -> int:
        return self.train_rows // self.batch


@dataclass(frozen=True)
class Learned:
    """What a run came to.

    Attributes:
        loss: mean binary cross-entropy over the held-out rows.
        digest: over every table, optimizer state and dense parameter.
        bytes: of all its checkpoints.
        error: at the first resume, for rows that training had changed and for those still as they were drawn: how many
            there are, the mean L2 norm of a row, and the mean L2 norm of what it is off by. Empty without a resume.
        first_update: the most that the first step after the first resume moves any weight of a table by. None without
            a resume.
    """

    loss: float
    auc: float
    digest: str
    bytes: int
    error: dict[str, dict[str, float]]
    first_update: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Learner:
    """What is trained.

    Attributes:
        digest: over all that training changes.
        codecs: arguments of the checkpointer.
        after_resume: told the tables when all is back.
    """

    model: torch.nn.Module
    optimizer: Any
    digest: Callable[[], str]
    codecs: Mapping[str, str]
    after_resume: Callable[[Sequence[Table]], None] = lambda _: None


MakeLearner = Callable[[Conditions, Wanted, Sequence[int], torch.device], Learner]


def fused_learner(conditions: Conditions, wanted: Wanted, table_sizes: Sequence[int], device: torch.device) -> Learner:
    """The example as it is: tables with fused row-wise Adagrad; the codec is that of their weights."""
    model, optimizer = build_model(table_sizes, conditions.dim, conditions.learning_rate, device, _SHARDING)
    codecs = {} if wanted.codec is None else {"codec": wanted.codec}
    return Learner(model, optimizer, lambda: digest(model, optimizer), codecs)


class Rows:
    """The rows of a Criteo file, read once for all runs.

    Attributes:
        held_out: the last rows of the file.
    """

    def __init__(self, path: Path, train_rows: int | None, held_out_rows: int, batch: int, most_rows: int) -> None:
        self._reader = CriteoReader(path, batch_size=batch, max_rows_per_table=most_rows)
        self.train_rows = min(train_rows or self._reader.rows, self._reader.rows - held_out_rows)
        self.table_sizes = self._reader.table_sizes
        last = CriteoReader(path, batch_size=held_out_rows, max_rows_per_table=most_rows)
        last.load_state_dict(last.state_dict() | {"samples": last.rows - held_out_rows})
        self.held_out: Batch = next(last)

    def from_the_first(self) -> CriteoReader:
        self._reader.load_state_dict(self._reader.state_dict() | {"samples": 0})
        return self._reader


class Run:
    """Interrupts are hard: all weights are lost, and what goes on is what the checkpoint brings back."""

    def __init__(
        self, conditions: Conditions, wanted: Wanted, rows: Rows, device: torch.device, make: MakeLearner
    ) -> None:
        self._conditions = conditions
        self._wanted = wanted
        self._rows = rows
        self._device = device
        make_repeatable(wanted.seed, threads=1)
        self._learner = make(conditions, wanted, rows.table_sizes, device)
        self.model, self.optimizer = self._learner.model, self._learner.optimizer
        self._reader = rows.from_the_first()
        self._bytes = 0
        self._first_update: float | None = None
        self._error: dict[str, dict[str, float]] = {}

    def learn(self) -> Learned:
        points = self._save_steps()
        with _store() as store:
            step = 0
            while step < self._conditions.steps:
                step = self._until_interrupted(store, step, points)
        loss, auc = self._judged()
        return Learned(loss, auc, self._learner.digest(), self._bytes, self._error, self._first_update)

    def _save_steps(self) -> set[int]:
        count = self._wanted.restores or (20 if self._wanted.codec else 0)
        return {self._conditions.steps * i // (count + 1) for i in range(1, count + 1)}

    def _until_interrupted(self, store: MemoryStore, done: int, points: set[int]) -> int:
        """The life of one process; returns the step at which it ended."""
        if self._wanted.codec is None:
            self._train(done, self._conditions.steps)
            return self._conditions.steps
        with Checkpointer(
            self.model, store, optimizer=self.optimizer, state={"reader": self._reader}, when=_NEVER,
            on_event=self._count, settings=_SETTINGS, **self._learner.codecs,
        ) as checkpointer:  # fmt: skip
            resumed = done
            if done:
                kept = self._weights() if not self._error else {}
                self._lose()
                progress = checkpointer.resume_from_checkpoint()
                assert progress is not None
                assert progress.step == done
                self._learner.after_resume(self._tables())
                if not self._error:
                    self._error = self._errors(kept)
                    self._first_update = self._update(done)
                    done += 1
            for point in sorted(p for p in points if p > resumed):
                self._train(done, point)
                done = point
                checkpointer.save_checkpoint(point).wait()
                if self._wanted.restores:
                    return point
            self._train(done, self._conditions.steps)
        return self._conditions.steps

    def _count(self, event: object) -> None:
        if isinstance(event, SaveEvent):
            self._bytes += event.bytes

    def _train(self, done: int, until: int) -> None:
        self.model.train()
        for _ in range(done, until):
            self.optimizer.zero_grad()
            loss, _ = self.model(to_torch(next(self._reader), self._device))
            loss.backward()
            self.optimizer.step()

    def _update(self, done: int) -> float:
        before = self._weights()
        self._train(done, done + 1)
        return max(float((now - before[table]).abs().max()) for table, now in self._weights().items())

    def _tables(self) -> list[Table]:
        return list(adapt(self.model, self.optimizer).tables())

    def _weights(self) -> dict[str, torch.Tensor]:
        return {t.shard.table: t.tensors[WEIGHT].detach().clone() for t in self._tables()}

    def _lose(self) -> None:
        with torch.no_grad():
            rows = [live for t in self._tables() for live in t.tensors.values()]
            for live in (*rows, *self.model.parameters()):
                live.detach().fill_(torch.nan)

    def _errors(self, kept: Mapping[str, torch.Tensor]) -> dict[str, dict[str, float]]:
        trained, norms, offs = [], [], []
        for table in self._tables():
            state = torch.cat([live.detach() for name, live in table.tensors.items() if name != WEIGHT], dim=1)
            trained.append(state.any(dim=1).numpy())
            norms.append(kept[table.shard.table].norm(dim=1).numpy())
            offs.append((table.tensors[WEIGHT].detach() - kept[table.shard.table]).norm(dim=1).numpy())
        changed, norm, off = (np.concatenate(parts) for parts in (trained, norms, offs))
        return {
            kind: {"rows": int(which.sum()), "norm": float(norm[which].mean()), "off": float(off[which].mean())}
            for kind, which in (("trained", changed), ("as drawn", ~changed))
            if which.any()
        }

    def _judged(self) -> tuple[float, float]:
        self.model.eval()
        batch = to_torch(self._rows.held_out, self._device)
        with torch.no_grad():
            _, (_, logits, labels) = self.model(batch)
        loss = binary_cross_entropy_with_logits(logits.double(), labels.double())
        return float(loss), float(binary_auroc(logits.double(), labels.long()))


@contextmanager
def _store() -> Iterator[MemoryStore]:
    store = MemoryStore(secrets.token_hex(8))
    try:
        yield store
    finally:
        store.delete([one.key for one in store.list()])
