"""FBGEMM and TorchRec, imported once with the warnings of their own imports let through; a process group of one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(fbgemm_gpu|torch\.jit)\..*")
    import torch.distributed.optim  # noqa: F401
    import torchrec.distributed
    import torchrec.distributed.train_pipeline
    import torchrec.models.dlrm  # noqa: F401

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "pipelines"))
sys.path.insert(0, str(TESTS / "oracle"))
sys.path.insert(0, str(TESTS / "unit" / "adapters"))
sys.path.insert(0, str(TESTS.parent / "examples"))

from repeatable import one_thread, store_name  # noqa: E402

__all__ = ["one_rank", "store_name"]

one_thread()


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    if dist.is_initialized():
        yield dist.group.WORLD
        return
    store: Path = tmp_path_factory.mktemp("rendezvous") / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
