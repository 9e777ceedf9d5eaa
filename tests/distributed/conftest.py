"""One process that has loaded torch and TorchRec, from which all ranks are forked."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_processes import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent), str(Path(__file__).parent)]))
        patch.setenv("PYTHONWARNINGS", "ignore")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        context.set_forkserver_preload(
            [
                "rank_lives",
                "rank_troubles",
                "dlrm_criteo",
                "dlrm_model",
                "digest",
                "saves",
                "incremental_ckpt.checkpointer",
            ]
        )
        yield Ranks(context)
