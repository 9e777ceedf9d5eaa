"""One thread, so that tests repeat; the modules beside the tests by their plain names."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))
sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))

from repeatable import one_thread

one_thread()
