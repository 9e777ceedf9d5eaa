"""Injectors for a FaultStore that let a test say what happens while a save writes.

They must not know what the bytes mean.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from incremental_ckpt.testing import Op, Perform
from incremental_ckpt.testing.stores import WRITES

TIMEOUT = 60.0


class Gate:
    """Holds every write until ``go``: the test acts between the writes, while the background cannot move on."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._go: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __call__(self, op: Op, perform: Perform) -> Any:
        if op.kind in WRITES:
            self._arrived.put(op.key)
            self._go.get(timeout=TIMEOUT)
        return perform(op)

    def wait(self) -> str:
        """The key of the write that is held now."""
        return self._arrived.get(timeout=TIMEOUT)

    def go(self) -> None:
        self._go.put(None)

    def between_writes(self, act: Callable[[str], None]) -> int:
        """Call ``act`` while each write is held, up to and including the commit's; how many packs there were."""
        packs = 0
        while True:
            key = self.wait()
            packs += key.endswith(".safetensors")
            act(key)
            self.go()
            if key.startswith("manifests/"):
                return packs
