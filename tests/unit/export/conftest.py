"""Makes the small runs and the hand-made chains importable by their plain names."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "compact"))
sys.path.insert(0, str(Path(__file__).parents[2] / "oracle"))

from repeatable import one_thread

one_thread()
