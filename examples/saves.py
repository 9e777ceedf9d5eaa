"""What a run saved, as a file of JSON lines and as a table.

It knows the library's events, and nothing of training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


@dataclass(frozen=True)
class Save:
    """One committed checkpoint; full_bytes is what all rows take uncompressed with their optimizer state."""

    seq: int
    step: int
    kind: str
    rows: int
    table_rows: int
    bytes: int
    stall_seconds: float
    full_bytes: int


class SaveLog:
    """An ``on_event`` that keeps every save and writes it to a file at once: a killed process leaves its facts."""

    def __init__(self, full_bytes: int, path: Path | None = None) -> None:
        self.saves: list[Save] = []
        self._full_bytes = full_bytes
        self._path = path

    def __call__(self, event: Any) -> None:
        from incremental_ckpt import SaveEvent

        if not isinstance(event, SaveEvent):
            return
        save = Save(
            event.seq,
            event.step,
            event.kind,
            event.rows,
            event.table_rows,
            event.bytes,
            event.stall_seconds,
            self._full_bytes,
        )
        self.saves.append(save)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(vars(save)) + "\n")

    def latest(self) -> str:
        """For the progress bar."""
        return f", saved {self.saves[-1].kind} of {size_of(self.saves[-1].bytes)}" if self.saves else ""


def read_saves(path: Path) -> list[Save]:
    return [Save(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def table_of(saves: Sequence[Save]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("seq", "step", "kind", "rows", "of all", "size", "of full", "stall"):
        table.add_column(heading, justify="left" if heading == "kind" else "right", no_wrap=True)
    for save in saves:
        table.add_row(
            str(save.seq),
            str(save.step),
            save.kind,
            f"{save.rows:,}",
            f"{save.rows / max(save.table_rows, 1):.2%}",
            size_of(save.bytes),
            f"{save.bytes / save.full_bytes:.1%}",
            f"{save.stall_seconds * 1e3:.1f} ms",
        )
    return table


def size_of(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
