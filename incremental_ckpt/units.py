"""Numbers of bytes as people read them.

It must not know what they are counted of.
"""

from __future__ import annotations

_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")


def size(count: int) -> str:
    """A number of bytes in decimal units: ``999 B``, ``1.0 kB``, ``2.8 GB``."""
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1000
        # 999.95 would be rounded to 1000.0
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value:,.1f} {_UNITS[-1]}"
