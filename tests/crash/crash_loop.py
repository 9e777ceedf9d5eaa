"""The long run of the crash loop: at least as many deaths as asked for, over every store, in several processes.

It must not know stores or lives; it shares the deaths out, and prints how many there were by store and by kind.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from multiprocessing import get_context
from pathlib import Path

SHARES = {"memory": 0.655, "local": 0.13, "fsspec-memory": 0.12, "fsspec-file": 0.08, "s3": 0.015}
"""Of the deaths. One over S3, with both ends of its HTTP in Python, takes as long as ten others."""
ROUND = 200
"""Deaths that are shared out together."""
AT_ONCE = 100
"""Deaths that a process reports together."""


@dataclass
class Tally:
    """What was seen so far.

    Attributes:
        next_seed: of the round that comes next.
        deaths: by store and kind.
        seconds: spent, by store.
    """

    next_seed: int = 0
    deaths: dict[str, Counter[str]] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(kinds.total() for kinds in self.deaths.values())

    def add(self, store: str, kinds: Counter[str], seconds: float) -> None:
        self.deaths.setdefault(store, Counter()).update(kinds)
        self.seconds[store] += seconds

    def write(self, path: Path) -> None:
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(vars(self), indent=1, sort_keys=True) + "\n")
        beside.replace(path)

    @classmethod
    def read(cls, path: Path) -> Tally:
        known = json.loads(path.read_text())
        deaths = {store: Counter(kinds) for store, kinds in known["deaths"].items()}
        return cls(known["next_seed"], deaths, Counter(known["seconds"]))

    def table(self) -> str:
        by_kind: Counter[str] = sum(self.deaths.values(), Counter())
        lines = [f"  {deaths:6}  {kind}" for kind, deaths in sorted(by_kind.items())]
        for store, kinds in [*self.deaths.items(), ("in all", by_kind)]:
            seconds = self.seconds[store] if store in self.deaths else sum(self.seconds.values())
            died = Counter[str]()
            for kind, deaths in kinds.items():
                died[kind.partition(",")[0]] += deaths
            shown = ", ".join(f"{who} {deaths}" for who, deaths in sorted(died.items()))
            lines.append(f"{store:14} {kinds.total():7} deaths {seconds:8.0f} s, nothing lost ({shown})")
        return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--deaths", type=int, default=30_000, help="in all, shared out over the stores")
    parser.add_argument("--stores", nargs="+", default=[*SHARES], choices=[*SHARES])
    parser.add_argument("--first-seed", type=int, default=0, help="another one gives other runs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no round begins later than that")
    parser.add_argument("--tally", type=Path, help="written after each round; where it is there, the loop goes on")
    arguments = parser.parse_args(argv)
    tally = Tally(arguments.first_seed)
    if arguments.tally is not None and arguments.tally.exists():
        tally = Tally.read(arguments.tally)
    begun = time.monotonic()
    # Not forked: the S3 server's thread and torch's would be missing in the child.
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        while tally.total < arguments.deaths and time.monotonic() - begun < arguments.seconds:
            play_round(pool, arguments.stores, min(ROUND, arguments.deaths - tally.total), tally)
            if arguments.tally is not None:
                tally.write(arguments.tally)
            print(f"{tally.total} deaths; the next seed is {tally.next_seed}", flush=True)
    print(tally.table())
    return 0


def play_round(pool: ProcessPoolExecutor, stores: Sequence[str], wanted: int, tally: Tally) -> None:
    """Every store comes up to its share. A run that fails ends the loop, and names its seed."""
    whole = sum(SHARES[name] for name in stores)
    first_seed = tally.next_seed
    futures: dict[Future[tuple[Counter[str], float]], str] = {}
    for name in sorted(stores, key=SHARES.__getitem__):  # what takes longest per death begins first
        share = ceil((tally.total + wanted) * SHARES[name] / whole)
        missing = share - tally.deaths.get(name, Counter[str]()).total()  # runs go on to their end, beyond a share
        for begun in range(0, missing, AT_ONCE):
            seed = first_seed + begun  # seeds do not meet the next's: nearly every run dies, and most die often
            tally.next_seed = max(tally.next_seed, seed + AT_ONCE)
            futures[pool.submit(work, name, seed, min(AT_ONCE, missing - begun))] = name
    for future in as_completed(futures):
        if future.exception() is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        tally.add(futures[future], *future.result())


def work(name: str, first_seed: int, wanted: int) -> tuple[Counter[str], float]:
    """Deaths over one store and the seconds they took."""
    for folder in ("oracle", "crash"):
        sys.path.insert(0, str(Path(__file__).parents[1] / folder))
    import torch

    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    logging.disable(logging.CRITICAL)  # every death of a background save is logged, as it should be
    from places import BUCKET_ON_LOOPBACK, PLACES
    from random_deaths import deaths_over

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="crash-loop-", dir=memory_folder()) as scratch:
        deaths = deaths_over(PLACES[name], Path(scratch), count(first_seed), wanted)
    BUCKET_ON_LOOPBACK.stop()
    return deaths, time.perf_counter() - begun


def memory_folder() -> Path | None:
    """A file system in memory, where there is one: a death of a process, unlike a power loss, spares what it has not
    yet flushed."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


if __name__ == "__main__":
    raise SystemExit(main())
