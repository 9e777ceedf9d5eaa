"""Which models fit into this machine's memory together.

It must not know what is done with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_MOST_MEMORY = 0.85
_BESIDE = 2 << 30  # the process itself, buffers, and the batch that touches the rows


def sizes_that_fit(sizes: Sequence[int], dim: int, available: int) -> list[int]:
    """The models that may be in memory together: the smallest ones."""
    fitting: list[int] = []
    for rows in sorted(sizes):
        if (sum(fitting) + rows) * (dim + 2) * 4 + _BESIDE <= _MOST_MEMORY * available or len(fitting) < 2:
            fitting.append(rows)
    return fitting


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
