"""The ranks of these tests, forked from the process that has loaded torch and TorchRec."""

from __future__ import annotations

import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from rank_processes import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))


@pytest.fixture(scope="session")
def ranks(forks: ForkServerContext) -> Ranks:
    return Ranks(forks)
