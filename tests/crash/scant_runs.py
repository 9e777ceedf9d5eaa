"""The small runs with as little beside the tables as a checkpoint must bring back: for loops that resume very often.

They must not know checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from small_runs import DIM, SMALL_DIM, Run
from torch import nn


class ScantRun(Run):
    """One dense weight, and buffers. Saving, resuming and comparing a Run take half as long again."""

    def __init__(self, layout: str, seed: int = 0) -> None:
        super().__init__(layout, seed)
        kept = [p for p in self.optimizers["dense"].param_groups[0]["params"] if p in {*self.model.tables.parameters()}]
        width = DIM + SMALL_DIM
        self.model.over = nn.Sequential(
            nn.BatchNorm1d(width, affine=False), nn.Dropout(0.2), nn.Linear(width, 1, bias=False)
        )
        self.optimizers["dense"] = torch.optim.Adam([*self.model.over.parameters(), *kept], lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers["dense"], 3, 0.9)


@cache
def scant_truth(layout: str, steps: int) -> Sequence[dict[str, Any]]:
    """The states of a run that nobody interrupts, by step."""
    run = ScantRun(layout)
    states = [run.copy()]
    for _ in range(steps):
        run.train()
        states.append(run.copy())
    return states
