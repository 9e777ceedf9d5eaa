"""FBGEMM and TorchRec, imported once with the warnings of their own imports let through; a process group of one; stores
in memory."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(fbgemm_gpu|torch\.jit)\..*")
    import torch.distributed.optim
    import torchrec.distributed
    import torchrec.models.dlrm  # noqa: F401

from incremental_ckpt.storage import MemoryStore

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # an explicit choice, for which torch warns if it is missing


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    if dist.is_initialized():
        yield dist.group.WORLD
        return
    store: Path = tmp_path_factory.mktemp("rendezvous") / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def store_name() -> Iterator[str]:
    """A name under which MemoryStores share their objects; they are dropped afterwards."""
    name = secrets.token_hex(8)
    yield name
    store = MemoryStore(name)
    store.delete([one.key for one in store.list()])
