"""How figures of accuracy stand on the page.

It must not know where they come from.
"""

from __future__ import annotations

from accuracy_figures import Mean


def percent(mean: Mean) -> str:
    return f"{mean.mean:+.3f} %" if mean.error is None else f"{mean.mean:+.3f} ± {mean.error:.3f} %"


def at_most(mean: Mean) -> str:
    """What two standard errors do not rule out; nothing of a single value."""
    return "" if mean.worst is None else f"{mean.worst:+.3f} %"
