"""Compacts a run's chain while the run goes on, each time in a process of its own and at the lowest priority.

It must not know ranks or the training thread, and must not import torch.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from incremental_ckpt.errors import CheckpointError
from incremental_ckpt.events import CompactEvent
from incremental_ckpt.repository import Repository
from incremental_ckpt.units import size

log = logging.getLogger("incremental_ckpt")

MEMORY = 256 << 20
_COMMAND = (sys.executable, "-m", "incremental_ckpt.compaction")
_GRACE = 5.0  # seconds from terminate to kill


def url_elsewhere(store: object) -> str:
    """What a Checkpointer was given, so that another process opens the same store.

    Raises:
        ValueError: no other process can.
    """
    if not isinstance(store, str | os.PathLike):
        raise ValueError(  # noqa: TRY004 - a Store is a right type, but not beside this setting
            "Settings.compact_after needs a store that another process can open: give its path or URL, not a "
            f"{type(store).__name__}"
        )
    url = os.fspath(store)
    if url.lower().startswith("memory://"):
        raise ValueError(f"Settings.compact_after needs a store that another process can open; {url} is this one's own")
    return url if "://" in url else str(Path(url).expanduser().absolute())


@dataclass(frozen=True)
class _Running:
    process: subprocess.Popen[bytes]
    step: int
    seq: int
    chain: int


class Compactions:
    """One compaction at a time, of the newest checkpoint as soon as its chain has enough deltas.

    A process, since the bytes that it moves would hold the interpreter that training needs; and whatever becomes of it,
    the run's memory, saves and marks are untouched. It ends when this process does, and is ended by ``close``: the next
    run begins it again, and finds what it has written (attempts of a compaction are deterministic).

    Args:
        url: the store, as a process elsewhere can open it.
        after: deltas in the chain.
        command: what is run; it gets url, seq, bytes of memory and the number of this process.
    """

    def __init__(
        self, repository: Repository, url: str, after: int, *, command: Sequence[str] = _COMMAND, memory: int = MEMORY
    ) -> None:
        self._repository = repository
        self._url = url
        self._after = after
        self._command = command
        self._memory = memory
        self._lock = threading.Lock()
        self._closed = False
        self._running: _Running | None = None
        self._commits_to_wait = 0
        self._events: queue.SimpleQueue[CompactEvent] = queue.SimpleQueue()

    def run(self, step: int) -> None:
        """Called after the commit of a step: take in how the last one ended, begin another where it is time. What goes
        wrong is told in an event, and nothing is raised."""
        with self._lock:
            self._take_in()
            self._commits_to_wait = max(0, self._commits_to_wait - 1)
            if self._running is None and not self._commits_to_wait and not self._closed:
                self._begin(step)

    def _begin(self, step: int) -> None:
        seq = chain = 0
        try:
            if seqs := self._repository.listing().seqs:
                seq = seqs[-1]
                chain = len(self._repository.chain(seq))
            if chain > self._after:
                self._running = _Running(self._start(seq), step, seq, chain)
        except (CheckpointError, OSError) as failure:
            self._ended(CompactEvent(step, seq, chain, 0, 0.0, str(failure)))

    def events(self) -> list[CompactEvent]:
        """What has ended since the last call. Any thread."""
        ended = []
        while not self._events.empty():
            ended.append(self._events.get())
        return ended

    def close(self) -> None:
        """Leave no process behind, and begin no more."""
        with self._lock:
            self._closed = True
            self._take_in()
            if self._running is None:
                return
            process, self._running = self._running.process, None
        process.terminate()
        try:
            process.communicate(timeout=_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def _start(self, seq: int) -> subprocess.Popen[bytes]:
        # The package may be importable here only by what this process has done to its path.
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.Popen(  # noqa: S603 - our own module, no shell
            [*self._command, self._url, str(seq), str(self._memory), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training, which then closes this
        )

    def _take_in(self) -> None:
        running = self._running
        if running is None or running.process.poll() is None:
            return
        self._running = None
        out, _ = running.process.communicate()
        self._ended(_event(running, out))

    def _ended(self, event: CompactEvent) -> None:
        if event.failure:
            self._commits_to_wait = self._after + 1  # what has failed once may well fail again
            log.warning(
                "seq %d is not compacted: %s (tried again after %d more saves)", event.seq, event.failure, self._after
            )
        else:
            log.info(
                "compacted seq %d: a chain of %d has an equivalent base, %s written in %.1f s",
                event.seq, event.chain_length, size(event.bytes), event.seconds,
            )  # fmt: skip
        self._events.put(event)


def _event(running: _Running, out: bytes) -> CompactEvent:
    said: dict[str, Any] = {}
    try:
        said = json.loads(out)
    except ValueError:
        code = running.process.returncode
        said["failure"] = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with {code}"
    written, seconds, failure = said.get("bytes", 0), said.get("seconds", 0.0), said.get("failure", "")
    return CompactEvent(running.step, running.seq, running.chain, written, seconds, failure)
