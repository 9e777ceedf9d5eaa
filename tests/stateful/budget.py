"""How long the tests of this folder search: ``ICKPT_SEARCH=50`` searches 50 times as long as every run of the tests does."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("ICKPT_SEARCH", "1"))


def seeds(count: int) -> range:
    return range(count * FACTOR)
