"""One compaction as a process of its own beside a training run: compaction/beside.py starts it and reads its JSON.

It must not know the run, except that it ends with it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from incremental_ckpt.compaction import compact
from incremental_ckpt.errors import CheckpointError
from incremental_ckpt.repository import Repository
from incremental_ckpt.storage import open_store

_LOWEST = 19
"""Nice value."""
_LOOK_SECONDS = 0.5


def main(arguments: Sequence[str]) -> int:
    """Args: arguments: url, seq, bytes of memory, process id of the run."""
    url, seq, memory, run = arguments
    end_with(int(run))
    if hasattr(os, "nice"):
        os.nice(_LOWEST)
    begun = time.monotonic()
    said: dict[str, Any]
    try:
        report = compact(Repository(open_store(url)), int(seq), memory=int(memory))
        said = {"bytes": report.bytes_written, "seconds": time.monotonic() - begun}
    except CheckpointError as failure:
        said = {"failure": str(failure)}
    except Exception as failure:
        said = {"failure": f"{failure!r}. This is a fault in incremental_ckpt"}
    sys.stdout.write(json.dumps(said) + "\n")
    return 1 if "failure" in said else 0


def end_with(process: int) -> None:
    """End this process soon after its parent ``process`` has ended, in whatever way that does."""

    def watch() -> None:
        while os.getppid() == process:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="ickpt-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
