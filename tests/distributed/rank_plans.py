"""What tests and ranks tell each other: how tables are sharded, by name, and what a rank has seen.

It must load neither torch nor TorchRec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

DIM = 8
ROWS = {"a": 50, "b": 31, "c": 23, "d": 17, "e": 7}

ROWWISE, ADAGRAD = "EXACT_ROWWISE_ADAGRAD", "EXACT_ADAGRAD"

Plan = Mapping[str, str]
"""By table: ``tw<rank>``, ``rw``, ``cw<rank><rank>…`` (one column shard each), ``twrw``, ``dp``; with ``!dense`` it is
sharded by TorchRec and updated by a torch optimizer."""

MIXED: Plan = {"a": "rw", "b": "cw01", "c": "tw1", "d": "dp", "e": "rw"}


def spread(way: str) -> Plan:
    """All tables sharded in one way."""
    return dict.fromkeys(ROWS, way)


@dataclass(frozen=True)
class Turn:
    """What a rank saw in ``reshard``.

    Attributes:
        resumed, saved: the whole state just after the resume (None: a cold start), and at the save.
        read: keys and bytes of what the resume read.
        position: where the reader stood after the resume.
        kind: of the checkpoint saved.
        rules: what that checkpoint says of rules applied.
    """

    resumed: dict[str, np.ndarray] | None
    saved: dict[str, np.ndarray]
    read: list[tuple[str, int]]
    position: int
    kind: str
    rules: list[str]


@dataclass(frozen=True)
class OwnState:
    """What a rank found after its resume and left at its end: reader, buffer, the next random number."""

    found: tuple[int, float, float]
    left: tuple[int, float, float]
    notes: list[str]
