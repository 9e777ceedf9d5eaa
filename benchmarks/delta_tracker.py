"""Marking and finding changed rows beside TorchRec's ModelDeltaTracker: what each adds to a step, and to a save.

It must not know how either keeps its ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import closing

import torch
from plan import Matrix
from rows import Row, quartiles, ratio_row
from shares import AIMED_SHARE
from timing import rounds_of, seconds_of
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from workload import Training

from incremental_ckpt.adapters import adapt
from incremental_ckpt.tracker import Tracker

_STEPS = 32  # between two reads
_MEASURE = "TorchRec's delta tracker"


def measure_delta_tracker(matrix: Matrix) -> list[Row]:
    """Blocks of the same steps in turn: with neither, with ours, with TorchRec's; a read after each."""
    with closing(matrix.training(matrix.rows, AIMED_SHARE)) as training:
        adapter = adapt(training.model, training.optimizer)
        tracker = Tracker(adapter.tables())
        by_rows = {t.shard.table.rsplit(".", 1)[-1] for t in adapter.tables() if t.tracked}
        theirs = _attach(training)
        sharded = [m for m in training.model.modules() if isinstance(m, ShardedEmbeddingBagCollection)]

        def block() -> float:
            training.rewind()
            return quartiles([seconds_of(training.step) for _ in range(_STEPS)])[1]

        def bare() -> tuple[float, float, int]:
            return block(), 0.0, 0

        def ours() -> tuple[float, float, int]:
            adapter.watch(tracker.mark, tracker.mark_all)
            try:
                step = block()
            finally:
                adapter.unwatch()
            return step, *_read(lambda: sum(len(r) for r in tracker.freeze() if r is not None), tracker.confirm)

        def torchrec() -> tuple[float, float, int]:
            for module in sharded:
                module.post_lookup_tracker_fn = theirs.record_lookup
            try:
                step = _stepping(training, theirs)
            finally:
                for module in sharded:
                    module.post_lookup_tracker_fn = None
            return step, *_read(lambda: _rows_of(by_rows, theirs.get_unique_ids()), lambda: None)

        bare()
        rounds = rounds_of(lambda: (bare(), ours(), torchrec()), matrix.repeats, matrix.budget)
    steps = {name: quartiles([r[i][0] for r in rounds])[1] for i, name in enumerate(("bare", "ours", "torchrec"))}
    reads = {name: quartiles([r[i][1] for r in rounds])[1] for i, name in ((1, "ours"), (2, "torchrec"))}
    common = {f"{name}_step_seconds": seconds for name, seconds in steps.items()}
    pairs = [(t[1], o[1]) for _, o, t in rounds]
    return [
        ratio_row(_MEASURE, "a step with our tracker / without", [(o[0], b[0]) for b, o, _ in rounds], **common),
        ratio_row(_MEASURE, "a step with TorchRec's / without", [(t[0], b[0]) for b, _, t in rounds], **common),
        ratio_row(
            _MEASURE,
            f"finding the changed rows after {_STEPS} steps: TorchRec's / ours",
            pairs,
            steps=_STEPS,
            torchrec_read_seconds=reads["torchrec"],
            our_read_seconds=reads["ours"],
            torchrec_rows=rounds[-1][2][2],
            our_rows=rounds[-1][1][2],
        ),
    ]


def _rows_of(tables: Collection[str], found: Mapping[str, torch.Tensor]) -> int:
    """Data-parallel tables, which ours saves whole, are not counted."""
    return sum(len(ids) for name, ids in found.items() if name.removesuffix(".weight").rsplit(".", 1)[-1] in tables)


def _attach(training: Training) -> ModelDeltaTrackerTrec:
    """It asks for a wrapper of the model that has ``module``; its hook is taken off until its turn."""
    (wrapped,) = [m for m in training.model.modules() if isinstance(m, DistributedDataParallel)][:1]
    tracker = ModelDeltaTrackerTrec(wrapped)
    for module in tracker.get_tracked_modules().values():
        module.post_lookup_tracker_fn = None
    return tracker


def _stepping(training: Training, tracker: ModelDeltaTrackerTrec) -> float:
    training.rewind()

    def step() -> None:
        training.step()
        tracker.step()

    return quartiles([seconds_of(step) for _ in range(_STEPS)])[1]


def _read(count: Callable[[], int], afterwards: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and how many rows."""
    found: list[int] = []
    seconds = seconds_of(lambda: found.append(count()))
    afterwards()
    return seconds, found[0]
