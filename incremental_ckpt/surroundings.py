"""What surrounds a model and decides whether a resumed run repeats: random generators, versions, threads.

It must not know models or stores.
"""

from __future__ import annotations

import platform
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from incremental_ckpt.errors import MismatchError

BY_RULE = "resumed_by_rule"
"""What a job put back by a rule instead of bit for bit; recorded with its checkpoints, no fact to compare."""


def capture_rng() -> dict[str, Any]:
    """The state of torch's (CPU and every CUDA device in use), numpy's and Python's global generators."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def why_rng_does_not_fit(state: Mapping[str, Any]) -> str | None:
    """Why ``restore_rng`` would refuse a state; None where it would not."""
    cuda = state.get("cuda")
    if cuda is None or not torch.cuda.is_available() or len(cuda) == torch.cuda.device_count():
        return None
    return (
        f"the checkpoint has random states of {len(cuda)} CUDA devices, this process sees {torch.cuda.device_count()}: "
        "show it the same number (CUDA_VISIBLE_DEVICES)"
    )


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the generators back where capture_rng found them.

    Raises:
        MismatchError: the number of CUDA devices differs.
    """
    if (why := why_rng_does_not_fit(state)) is not None:
        raise MismatchError(why)
    cuda = state.get("cuda")
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(cuda)
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def describe(world_size: int) -> dict[str, Any]:
    """What a run must have in common with the one that it resumes to repeat it bit for bit."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "world_size": world_size,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cuda": torch.version.cuda or "none",
    }
    for name in ("torchrec", "fbgemm_gpu"):
        module = sys.modules.get(name)
        if module is not None:
            facts[name] = str(getattr(module, "__version__", "unknown"))
    return facts


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each fact that differs."""
    return [
        f"{name}: {before.get(name, 'absent')} then, {now.get(name, 'absent')} now"
        for name in sorted((before.keys() | now.keys()) - {BY_RULE})
        if before.get(name) != now.get(name)
    ]
