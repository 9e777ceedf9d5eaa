"""Makes the small runs importable by their plain name; one thread, so that runs repeat bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))

from repeatable import one_thread, store_name

__all__ = ["store_name"]

one_thread()
