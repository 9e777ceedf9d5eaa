"""One way in which a model and a saved state differ.

It must not know what states consist of.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """What differs, as a line for people.

    Attributes:
        fatal: nothing of it can be loaded; otherwise one side merely lacks it.
    """

    text: str
    fatal: bool = False
