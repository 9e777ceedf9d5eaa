"""What the project has set itself, line by line, and where in the results the answer is.

It must not know how a page looks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ResultRow = Mapping[str, Any]


@dataclass(frozen=True)
class Aim:
    """One line of the table.

    Attributes:
        title: what is measured.
        measure: of the rows that answer it.
        what: a regular expression that finds them by their ``what``.
        reason: why it is missed, where it is.
    """

    title: str
    measure: str
    what: str
    reason: str = ""

    def answers(self, results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ResultRow]]:
        """Rows with a target, each with the name of its result."""
        return [
            (name, row)
            for name, result in results.items()
            for row in result["rows"]
            if row["measure"] == self.measure and row["target"] is not None and re.search(self.what, row["what"])
        ]


AIMS: Sequence[Aim] = (
    Aim(
        "tracking, per step", "tracking", "step with the tracker",
        "marking writes one byte at a random place per look-up, about 1 ms of a 75 ms step here; blocks of equal steps "
        "differ by more than that among themselves (see the quartiles)",
    ),
    Aim(
        "stall of a raw delta / bare gather", "stall", "^save_checkpoint",
        "the scan of one byte per row comes on top of the gather; see where the stall goes",
    ),
    Aim(
        "stall of `dcp.async_save` / of a delta", "peers", "dcp.async_save",
        "runs on this machine had 23 to 36: the peer's stall varies between 0.7 and 1.4 s",
    ),
    Aim(
        "the same, its staging buffers kept", "other checkpointers, stall", "dcp.async_save, thread",
        "with kept buffers it is a plain copy of the model at memory speed, and the copy is 50 times as large as a "
        "delta of 2 %; gathering and scanning cost the delta the rest",
    ),
    Aim("stall of a base / of a delta", "base", "streamed base"),
    Aim("memory that a delta takes", "memory", "deltas"),
    Aim("memory that a base takes (no second copy)", "memory", "a base"),
    Aim(
        "stall, growth with the rows of the model", "growth with rows", "^stall",
        "the bare gather of as many rows grows beyond the aim by itself, as they lie further apart in memory; and one "
        "byte per row is scanned whatever has changed, which is a good third of the stall at 50M rows (both are in the "
        "figure)",
    ),
    Aim(
        "time to durable / write + fsync of as many bytes", "time to durable", "changed",
        "a pack is checksummed and copied once by the same low-priority thread that writes it; manifest and vote are "
        "two more files with an fsync each",
    ),
    Aim(
        "training speed beside back-to-back deltas", "speed", "back-to-back deltas",
        "the background gets its turn on cores that training keeps busy; without it a save might never end",
    ),
    Aim("training speed beside a base that streams", "speed", "a base that streams"),
    Aim("fewer bytes at 26 % changed, int8", "fewer bytes", "^int8"),
    Aim("fewer bytes at 26 % changed, int4", "fewer bytes", "^int4"),
    Aim("fewer bytes at 26 % changed, int2", "fewer bytes", "^int2"),
    Aim("resume of a base and 20 deltas / `dcp.load`", "resume", r"\bdeltas / dcp.load"),
    Aim(
        "run time with `Adaptive(max_overhead=0.035)` / without", "recovery", "^run time",
        "windows of one interval differ among themselves by as much as the budget (see the quartiles); runs had 1.033",
    ),
    Aim("expected recovery time at 3.5 % overhead, `dcp.save` / ours", "recovery", "^expected recovery"),
    Aim("upload to S3 (moto) / boto3's `upload_file`", "stores", "^upload, s3: .*_file$"),
    Aim("download from S3 (moto) / boto3's `download_file`", "stores", "^download, s3: .*_file$"),
    Aim("encode `int8` / FBGEMM's op", "codecs: speed", "^encode int8:"),
    Aim("encode `int4` without a search / FBGEMM's op", "codecs: speed", "^encode int4 without a search:"),
    Aim("encode `int4` / PyTorch's greedy search", "codecs: speed", "^encode int4:"),
    Aim("encode `int2` / PyTorch's greedy search", "codecs: speed", "^encode int2:"),
    Aim("decode / encode `int8`, compiled loop", "codecs: speed", "^decode int8 by the compiled loop:"),
    Aim("decode / encode `int8`, numpy", "codecs: speed", "^decode int8 by numpy:"),
    Aim("error of `int4` / of PyTorch's greedy search", "codecs: error", "^int4, normal"),
    Aim("error of `int2` / of PyTorch's greedy search", "codecs: error", "^int2, uniform"),
    Aim("bytes of a row with index and row-wise Adagrad, `int8` / raw", "codecs: bytes", "^int8"),
    Aim("the same, `int4` / raw", "codecs: bytes", "^int4"),
    Aim("the same, `int2` / raw", "codecs: bytes", "^int2"),
)  # fmt: skip
