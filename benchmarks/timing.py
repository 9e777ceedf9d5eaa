"""Measures peers in turn, A B A B, so that what else the machine does meets all of them alike.

It must not know what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def seconds_of(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def rounds_of(
    play: Callable[[], T], repeats: int, budget: float, clock: Callable[[], float] = time.perf_counter
) -> list[T]:
    """What each round gave.

    Args:
        play: one round, in which every peer has its turn.
        repeats: rounds at most; at least two are played, if as many are asked for.
        budget: seconds after which no further round begins.
    """
    begun = clock()
    rounds: list[T] = []
    while len(rounds) < repeats and (len(rounds) < 2 or clock() - begun < budget):
        rounds.append(play())
    return rounds
