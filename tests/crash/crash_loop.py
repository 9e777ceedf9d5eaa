"""The long run of the crash loop: at least as many deaths as asked for, over every store, in several processes.

It must not know stores or lives; it shares the deaths out and prints one line for each store.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import count
from multiprocessing import get_context
from pathlib import Path

SHARES = {"memory": 0.7, "local": 0.12, "fsspec-memory": 0.12, "fsspec-file": 0.05, "s3": 0.01}
AT_ONCE = 100
"""Deaths that a process reports together."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--deaths", type=int, default=30_000, help="in all, shared out over the stores")
    parser.add_argument("--stores", nargs="+", default=[*SHARES], choices=[*SHARES])
    parser.add_argument("--first-seed", type=int, default=0, help="another one gives other runs")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args(argv)
    shares = {name: SHARES[name] / sum(SHARES[one] for one in arguments.stores) for name in arguments.stores}
    done = dict.fromkeys(shares, 0)
    spent = dict.fromkeys(shares, 0.0)
    # Not forked: the S3 server's thread and torch's would be missing in the child.
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        futures = {
            pool.submit(work, name, arguments.first_seed + number * AT_ONCE, AT_ONCE): name
            for name, share in shares.items()
            for number in range(-(-round(arguments.deaths * share) // AT_ONCE))
        }
        for future in as_completed(futures):
            name = futures[future]
            if future.exception() is not None:
                pool.shutdown(wait=False, cancel_futures=True)
            deaths, seconds = future.result()  # what failed ends the loop, and names its seed
            done[name] += deaths
            spent[name] += seconds
            print(f"{name}: {done[name]} deaths", flush=True)
    for name in shares:
        print(f"{name:14} {done[name]:7} deaths {spent[name]:8.0f} s, nothing lost")
    print(f"{'in all':14} {sum(done.values()):7} deaths {sum(spent.values()):8.0f} s, nothing lost")
    return 0


def work(name: str, first_seed: int, wanted: int) -> tuple[int, float]:
    """Deaths over one store and the seconds they took. Every run dies several times: seeds do not meet the next's."""
    for folder in ("oracle", "crash"):
        sys.path.insert(0, str(Path(__file__).parents[1] / folder))
    import torch

    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    logging.disable(logging.CRITICAL)  # every death of a background save is logged, as it should be
    from places import BUCKET_ON_LOOPBACK, PLACES
    from random_deaths import deaths_over

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="crash-loop-") as scratch:
        outcome = deaths_over(PLACES[name], Path(scratch), count(first_seed), wanted)
    BUCKET_ON_LOOPBACK.stop()
    return outcome.deaths, time.perf_counter() - begun


if __name__ == "__main__":
    raise SystemExit(main())
