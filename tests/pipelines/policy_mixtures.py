"""Mixtures of the policies that say when to save, which kind, and what to do while the last save is not durable.

It must not know runs, nor what is expected of them.
"""

from __future__ import annotations

from incremental_ckpt import Adaptive, EveryEpoch, EverySeconds, EverySteps
from incremental_ckpt.policy import BusyPolicy, KindPolicy, When

POLICIES: dict[str, When | list[When]] = {
    "steps": EverySteps(3),
    "seconds": EverySeconds(0.45),
    "epochs": EveryEpoch(),
    "adaptive": Adaptive(max_overhead=0.5),
    "several": [EverySteps(5), EveryEpoch(), EverySeconds(1.0), Adaptive(max_overhead=0.2, mtbf=10.0)],
}
MIXTURES: list[tuple[str, KindPolicy, BusyPolicy]] = [
    ("steps", "intermittent", "defer"),
    ("seconds", "consecutive", "wait"),
    ("epochs", "one-shot", "defer"),
    ("adaptive", "intermittent", "defer"),
    ("adaptive", "consecutive", "skip"),
    ("several", "full", "skip"),
    ("several", "intermittent", "wait"),
]
"""Every policy of each sort, by the name of when."""
