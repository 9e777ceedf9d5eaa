"""One process per worker that has loaded torch and TorchRec: loading them takes longer than most lives in the tests."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRELOADED = [
    "torch._dynamo",  # torch.optim loads it when it is first used
    "torch.distributed.checkpoint",
    "incremental_ckpt.checkpointer",
    "incremental_ckpt.testing",
    "dlrm_criteo",
    "dlrm_model",
    "digest",
    "saves",
    "rank_lives",
    "rank_troubles",
]
FOLDERS = [ROOT / "examples", ROOT, ROOT / "tests" / "distributed"]
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, FOLDERS)),
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "GLOO_SOCKET_IFNAME": "lo",
}


@pytest.fixture(scope="session")
def forks() -> ForkServerContext:
    """All processes of it have the environment that it was started with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context
