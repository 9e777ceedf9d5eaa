"""A training job in a process of its own that holds still where it is told to, so that it can be stopped there.

It must not know why; it reads one order per line on stdin and answers on stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))
from small_runs import Run

from incremental_ckpt import Checkpointer, CheckpointError
from incremental_ckpt.storage import LocalStore
from incremental_ckpt.testing import FaultStore, Op, Perform, on


def main(orders: TextIO, answers: TextIO) -> None:
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()

    def hold() -> None:
        """Says so, and waits for a line: a stopped process waits all the same, whatever is written to it."""
        print("held", file=answers, flush=True)
        orders.readline()

    print("ready", file=answers, flush=True)
    while line := orders.readline():
        print(json.dumps(live(**json.loads(line), hold=hold)), file=answers, flush=True)


def live(folder: str, kind: str | None, key: str, hold: Any) -> list[str]:
    """Save steps 1 to 3, holding at the operation of the second save that matches (kind None: before that save).

    Returns:
        what became of each of the three saves: "saved", or the name of the error.
    """
    run, store, told = Run(), FaultStore(LocalStore(folder)), list[str]()
    with Checkpointer(run.model, store, **run.arguments) as checkpointer:
        for step in (1, 2, 3):
            run.train()
            if step == 2:
                if kind is None:
                    hold()
                else:
                    store.inject(holding(kind, key, hold))
            try:
                checkpointer.save_checkpoint(step, kind="consecutive").wait()
                told.append("saved")
            except CheckpointError as error:
                told.append(type(error).__name__)
    return told


def holding(kind: Any, key: str, hold: Any) -> Any:
    when = on(kind, key, at=1)

    def injector(op: Op, perform: Perform) -> Any:
        if when(op):
            hold()
        return perform(op)

    return injector


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
