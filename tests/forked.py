"""Scripts in processes that are forked from one that has loaded torch and TorchRec, instead of loading them anew.

It must not know what they do.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory


def run(forks: ForkServerContext, script: Path, *arguments: object, seconds: float = 200) -> CompletedProcess[str]:
    """What ``python script arguments`` does, for a script with a ``main`` of ``sys.argv``."""
    words = [str(argument) for argument in arguments]
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        process = forks.Process(target=_live, args=(script, words, outputs))
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
        stdout, stderr = (path.read_text() for path in outputs)
    return CompletedProcess([str(script), *words], process.exitcode or 0, stdout, stderr)


def _live(script: Path, arguments: Sequence[str], outputs: Sequence[Path]) -> None:
    for path, stream in zip(outputs, (sys.stdout, sys.stderr), strict=True):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments]
    sys.exit(importlib.import_module(script.stem).main())
