"""Makes the tables of numbers of these tests importable by their plain name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "oracle"))

from repeatable import one_thread, store_name

__all__ = ["store_name"]

one_thread()
