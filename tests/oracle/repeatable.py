"""What lets a small run repeat bit for bit: one thread, no choice left to torch, and named stores in memory.

It must not know any run.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch

from incremental_ckpt.storage import MemoryStore


def one_thread() -> None:
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # an explicit choice, for which torch warns if it is missing


@pytest.fixture
def store_name() -> Iterator[str]:
    """A name under which MemoryStores share their objects; they are dropped afterwards."""
    name = secrets.token_hex(8)
    yield name
    store = MemoryStore(name)
    store.delete([one.key for one in store.list()])
