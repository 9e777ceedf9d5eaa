"""One thread, so that tests repeat; the modules beside the tests by their plain names."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("oracle", "crash", "conformance")]
torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns of the choice that it makes itself
