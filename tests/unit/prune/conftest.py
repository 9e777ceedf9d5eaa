"""Makes the small runs and the hand-made chains importable by their plain names."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

for folder in (Path(__file__).parents[1] / "compact", Path(__file__).parents[2] / "oracle"):
    sys.path.insert(0, str(folder))
torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns of the choice that it makes itself
