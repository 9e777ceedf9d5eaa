"""How many bits a weight gets for the restores that a run expects and has had.

It must not know checkpoints: it is told how many restores lie behind a run, and gives a codec's name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

_BITS_UP_TO = ((1, 2), (3, 4))
"""Restores, and the fewest bits that docs/accuracy.md allows for them."""
_MOST_BITS = 8
_COUNTLESS = 1e9
AUTO = "auto"


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


@dataclass(frozen=True)
class AutoCodec:
    """Chooses the bits of weights, save by save: for as many restores as are foreseen, or for more where the run has
    had more. Without arguments none are foreseen.

    Attributes:
        failures_per_hour: of the whole job, all its machines together.
        hours: that the run will take in all, not counted from the last resume.
    """

    failures_per_hour: float | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        if (self.failures_per_hour is None) != (self.hours is None):
            raise ValueError("AutoCodec takes failures_per_hour and hours together, or neither")
        for name in ("failures_per_hour", "hours"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
                raise TypeError(f"AutoCodec.{name} takes a number, or None, not {value!r}")
            if value is not None and not 0 <= float(value) < math.inf:
                raise ValueError(f"AutoCodec.{name} must be 0 or more and finite, not {value!r}")

    @property
    def foreseen(self) -> int:
        """Restores that the failure rate and the length of the run let expect."""
        if self.failures_per_hour is None or self.hours is None:
            return 0
        return math.ceil(min(self.failures_per_hour * self.hours, _COUNTLESS))

    def codec_after(self, restores: int) -> str:
        """The codec of a checkpoint behind which lie so many restores: whoever comes to use it restores once more."""
        return f"int{bits_for_restores(max(self.foreseen, restores + 1))}"
