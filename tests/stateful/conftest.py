from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from driver import real_code_under_the_scheduler


@pytest.fixture
def scheduled() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with real_code_under_the_scheduler():
        yield
    torch.set_num_threads(threads)
