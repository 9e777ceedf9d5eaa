"""How many bits a value gets for the restores that a run expects.

It must not know codecs: it gives a width, not what is done with it.
"""

from __future__ import annotations

_BITS_UP_TO = ((1, 2), (3, 3), (20, 4))
_MOST_BITS = 8


def bits_for_restores(restores: int) -> int:
    """The fewest bits whose loss of accuracy that many restores do not add up to a visible one.

    Args:
        restores: how often the run is expected to resume from a checkpoint in all, those behind it included.

    Raises:
        ValueError: the number is negative.
    """
    if restores < 0:
        raise ValueError(f"restores is {restores}; a run resumes 0 times or more")
    return next((bits for most, bits in _BITS_UP_TO if restores <= most), _MOST_BITS)
