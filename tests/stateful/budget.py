"""How long the tests of this folder search: with ``ICKPT_SEARCH=50`` 50 times as long as in every run of the tests."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("ICKPT_SEARCH", "1"))


def seeds(count: int) -> range:
    return range(count * FACTOR)
