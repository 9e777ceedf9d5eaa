"""The example on a terminal: how far it is, what it saved last, and its digest as the last line."""

from __future__ import annotations

import os
import pty
import re
import termios
import threading
from multiprocessing.context import ForkServerContext
from pathlib import Path

import synthetic
from test_kill_and_resume import live


def test_the_example_shows_its_steps_and_what_it_saved(forks: ForkServerContext, tmp_path: Path) -> None:
    synthetic.write_file(tmp_path / "train.txt", 500, seed=3)
    options = ["--data", str(tmp_path / "train.txt"), "--steps", "40", "--save-every", "10", "--batch-size", "8"]
    options += ["--embedding-dim", "4", "--max-rows-per-table", "500", "--store", str(tmp_path / "store")]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    shown = b""

    def read() -> None:
        nonlocal shown
        try:
            while chunk := os.read(ours, 1 << 16):
                shown += chunk
        except OSError:
            pass  # Linux: the other end is closed

    reader = threading.Thread(target=read)
    reader.start()
    process = forks.Process(target=live, args=(options, Path(os.ttyname(theirs))))
    process.start()
    process.join()
    os.close(theirs)
    reader.join()
    os.close(ours)
    text = shown.decode()
    assert process.exitcode == 0, text
    bars = [line for line in re.split(r"[\r\n]+", text) if re.search(r"\d+/40 \[", line)]
    assert len(bars) > 1, "it moves"
    assert "100%" in bars[-1]
    assert "40/40" in bars[-1]
    assert "loss " in bars[-1]
    assert "saved " in bars[-1]
    assert text.rstrip().splitlines()[-1].startswith("digest ")
