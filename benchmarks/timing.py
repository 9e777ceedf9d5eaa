"""Measures peers in turn, A B A B, so that what else the machine does meets all of them alike.

It must not know what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def seconds_of(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def in_turn(
    arms: Sequence[Callable[[], T]],
    repeats: int,
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[T, ...]]:
    """Run every arm once per round.

    Args:
        repeats: rounds at most; at least two are run, if as many are asked for.
        budget: seconds after which no further round begins.

    Returns:
        One tuple per round, in the order of the arms.
    """
    begun = clock()
    rounds: list[tuple[T, ...]] = []
    while len(rounds) < repeats and (len(rounds) < 2 or clock() - begun < budget):
        rounds.append(tuple(arm() for arm in arms))
    return rounds
