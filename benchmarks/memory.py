"""How much host memory saves take beside training, at the peak.

It must not know how a save works.
"""

from __future__ import annotations

import gc
from pathlib import Path

from plan import Plan
from rows import Row, Target, ratio_row
from saving import BASE, DELTA, Saves

from incremental_ckpt import SaveEvent
from incremental_ckpt.adapters import adapt
from incremental_ckpt.policy import KindPolicy

_STATUS = Path("/proc/self/status")
_ALLOWANCE = 256 << 20
_STEPS_BEFORE = 10


def measure_memory(plan: Plan) -> list[Row]:
    """The process's peak of resident memory over each save and the training beside it, against its resident memory
    before there was a Checkpointer; the page cache is no part of it.

    Nothing must have been saved before in the process: freed memory that it keeps would hide what a save takes.
    """
    training = plan.training
    for table in adapt(training.model, training.optimizer).tables():
        for live in table.tensors.values():
            live.mul_(1)  # fresh zeros have no pages yet, and training would seem to take them
    training.interval()
    for _ in range(_STEPS_BEFORE):
        training.step()
    gc.collect()
    before = _resident("VmRSS")
    _reset_peak()
    training.interval()
    training.step()
    of_training = _resident("VmHWM") - before
    with plan.saves("memory") as saves:
        saves.save(BASE)
        deltas = [_peak_beside(plan, saves, DELTA) for _ in range(plan.repeats)]
        bases = [_peak_beside(plan, saves, BASE)]
    limit = 2 * deltas[0][1].bytes + _ALLOWANCE
    return [
        ratio_row(
            "memory",
            f"peak extra memory of {what} / (2 x a delta's bytes + 256 MiB)",
            [(peak - before, limit) for peak, _ in peaks],
            Target("at most", 1.0),
            extra_bytes=max(peak for peak, _ in peaks) - before,
            limit_bytes=limit,
            resident_before_bytes=before,
            peak_of_training_alone_bytes=of_training,
            bytes_per_save=peaks[0][1].bytes,
        )
        for what, peaks in (("deltas", deltas), ("a base", bases))
    ]


def _peak_beside(plan: Plan, saves: Saves, kind: KindPolicy) -> tuple[int, SaveEvent]:
    plan.training.interval()
    _reset_peak()
    handle, _ = saves.begin(kind)
    while not handle.done():
        plan.training.step()
    peak = _resident("VmHWM")
    return peak, saves.event(handle)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _resident(name: str) -> int:
    """Bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
