"""A past of two jobs, what may be damaged in it, and the judgement of a resume from what is left.

It must not know in which store the objects lie.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
from lives import TINY
from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, CheckpointError, ResumeEvent
from incremental_ckpt.format import layout
from incremental_ckpt.storage import MemoryStore, Store

Objects = Mapping[str, bytes]


@dataclass(frozen=True)
class Past:
    """Two jobs: base 1, deltas 2 and 3, one-shot 4; then one that resumed 3, with base 5 and delta 6."""

    objects: Objects
    states: Mapping[int, Mapping[str, Any]]
    ancestors: Mapping[int, frozenset[int]]


def make_past(run_layout: str) -> Past:
    name = secrets.token_hex(8)
    states: dict[int, Mapping[str, Any]] = {}
    run = Run(run_layout)
    for job in range(2):
        with Checkpointer(run.model, MemoryStore(name), **run.arguments, settings=TINY) as checkpointer:
            if job:
                checkpointer.resume_from_checkpoint(step=3)
            for kind in ("consecutive", "one-shot") if job else ("full", "consecutive", "consecutive", "one-shot"):
                run.train()
                step = len(states) + 1
                checkpointer.save_checkpoint(step, kind=kind).wait()  # type: ignore[arg-type]
                states[step] = run.copy()
        run = Run(run_layout, 3)
    store = MemoryStore(name)
    objects = {one.key: bytes(store.get(one.key)) for one in store.list()}
    ancestors = {6: frozenset({6, 5, 3, 2, 1}), 5: frozenset({5, 3, 2, 1}), 4: frozenset({4, 3, 2, 1})}
    return Past(objects, states, ancestors)


class Victim:
    """One model that is put back from one damaged store after another."""

    def __init__(self, run_layout: str, store: Store | None = None) -> None:
        self.run = Run(run_layout, 21)
        self._store = MemoryStore() if store is None else store
        self._held: dict[str, bytes] = {}

    def resume(self, objects: Objects) -> tuple[int, list[ResumeEvent]] | CheckpointError:
        store = self._holding(objects)
        events: list[Any] = []
        try:
            with Checkpointer(
                self.run.model, store, **self.run.arguments, settings=TINY, on_event=events.append
            ) as checkpointer:
                progress = checkpointer.resume_from_checkpoint()
        except CheckpointError as error:
            return error
        return (0 if progress is None else progress.step), events

    def _holding(self, objects: Objects) -> Store:
        """The store with these objects and no others; only what differs is written."""
        store = self._store
        there = [one.key for one in store.list()]
        store.delete([key for key in there if key not in objects or self._held.get(key) != objects[key]])
        for key, value in objects.items():
            if self._held.get(key) != value:
                store.put(key, [value])
        self._held = dict(objects)
        return store


def judge(past: Past, victim: Victim, objects: Objects, what: str, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    outcome = victim.resume(objects)
    if isinstance(outcome, CheckpointError):
        assert str(outcome), what
        return "error"
    step, events = outcome
    newest = max((layout.parse_key(k).seq for k in objects if _is_manifest(k)), default=0)  # type: ignore[union-attr]
    assert step in past.ancestors.get(newest, {newest}), f"{what}: resumed {step}, which is no ancestor of {newest}"
    assert_same(victim.run.copy(), past.states[step])
    if step == newest:
        return "newest"
    assert any(r.levelno == logging.WARNING for r in caplog.records), f"{what}: fell back to {step} without a warning"
    assert events[0].passed_over[0][0] == newest
    return "ancestor"


def _is_manifest(key: str) -> bool:
    parsed = layout.parse_key(key)
    return parsed is not None and parsed.what == "manifest"


def flips(objects: Objects) -> Iterator[tuple[str, Objects]]:
    for key, value in objects.items():
        places = {0, 1, 12, 90, len(value) // 3, len(value) // 2, 2 * len(value) // 3, len(value) - 2, len(value) - 1}
        for at in sorted(p for p in places if 0 <= p < len(value)):
            damaged = bytearray(value)
            damaged[at] ^= 1 << at % 8
            yield f"{key} byte {at}", {**objects, key: bytes(damaged)}


def cuts(objects: Objects) -> Iterator[tuple[str, Objects]]:
    for key, value in objects.items():
        yield f"{key} missing", {k: v for k, v in objects.items() if k != key}
        for size in {0, len(value) // 2, len(value) - 1}:
            yield f"{key} cut to {size}", {**objects, key: value[:size]}
        yield f"{key} with a byte more", {**objects, key: value + b" "}


def swaps(objects: Objects) -> Iterator[tuple[str, Objects]]:
    for a, b in combinations(objects, 2):
        if a.rsplit(".", 1)[1] == b.rsplit(".", 1)[1]:
            yield f"{a} and {b} swapped", {**objects, a: objects[b], b: objects[a]}
