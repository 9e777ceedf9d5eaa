"""Makes the small runs importable by their plain name; one thread, so that runs repeat bit for bit."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from incremental_ckpt.storage import MemoryStore

sys.path.insert(0, str(Path(__file__).parents[2] / "oracle"))
torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns of the choice that it makes itself


@pytest.fixture
def store_name() -> Iterator[str]:
    """A name under which MemoryStores share their objects; they are dropped afterwards."""
    name = secrets.token_hex(8)
    yield name
    store = MemoryStore(name)
    store.delete([one.key for one in store.list()])
