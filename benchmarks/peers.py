"""The stall of a delta against that of torch.distributed.checkpoint's async_save of the same model.

It must not know what is inside either.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from plan import Plan
from rows import Row, Target, quartiles, ratio_row
from saving import DELTA
from timing import rounds_of
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from workload import Training


def measure_peers(plan: Plan) -> list[Row]:
    """async_save's stall ends when its staging is done; making the state dicts is not counted, training waits for the
    upload."""
    training = plan.training
    target_folder = plan.folder / "async_save"
    # What async_save makes for itself each time; one that is kept has its buffers already.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    uploads: list[float] = []

    def peer(kept: AsyncStager | None) -> float:
        training.interval()
        stall, upload = _async_save(training, target_folder, kept)
        uploads.append(upload)
        return stall

    try:
        with plan.saves("peers") as saves:
            saves.start()
            peer(None)
            peer(stager)

            def delta() -> float:
                training.interval()
                return saves.save(DELTA).wall_seconds

            rounds = rounds_of(lambda: (delta(), peer(None), peer(stager)), plan.repeats, plan.budget)
            delta_seconds = quartiles([d for d, _, _ in rounds])[1]
    finally:
        stager.close()
    common: dict[str, Any] = {
        "delta_stall_seconds": delta_seconds,
        "upload_seconds": quartiles(uploads)[1],
        "output": "DTensor",
        "executor": "thread",
    }
    return [
        ratio_row(
            "peers",
            "stall of dcp.async_save / of a delta",
            [(default, delta) for delta, default, _ in rounds],
            Target("at least", 25.0),
            async_save_seconds=quartiles([default for _, default, _ in rounds])[1],
            **common,
        ),
        ratio_row(
            "peers",
            "the same, its stager and buffers kept from save to save",
            [(kept, delta) for delta, _, kept in rounds],
            async_save_seconds=quartiles([kept for _, _, kept in rounds])[1],
            **common,
        ),
    ]


def _async_save(training: Training, folder: Path, stager: AsyncStager | None) -> tuple[float, float]:
    """Seconds until staging is done, and from then until all is written."""
    state: dict[str, Any] = {
        "model": training.model.state_dict(),
        "fused": training.model.fused_optimizer.state_dict(),
        "optimizer": training.optimizer.state_dict(),
    }
    begun = time.perf_counter()
    response = async_save(state, checkpoint_id=folder, async_stager=stager)
    if isinstance(response, AsyncSaveResponse):
        response.staging_completion.result()
        upload = response.upload_completion
    else:
        upload = response  # its staging is done
    stalled = time.perf_counter()
    upload.result()
    written = time.perf_counter()
    shutil.rmtree(folder)
    os.sync()
    return stalled - begun, written - stalled
