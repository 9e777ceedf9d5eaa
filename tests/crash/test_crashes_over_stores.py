"""Runs that die at random writes until they are done, over every store; ``make crash-loop`` makes it a long run."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from crash_loop import SHARES
from places import BUCKET_ON_LOOPBACK, PLACES
from random_deaths import deaths_over

DEATHS = {"memory": 40, "local": 15, "fsspec-memory": 20, "fsspec-file": 12, "s3": 4}


@pytest.fixture(scope="module", autouse=True)
def _bucket() -> object:
    yield
    BUCKET_ON_LOOPBACK.stop()


@pytest.mark.parametrize("name", PLACES)
def test_runs_that_die_at_random_writes_lose_nothing_over_any_store(name: str, tmp_path: Path) -> None:
    outcome = deaths_over(PLACES[name], tmp_path, count(), DEATHS[name])
    assert outcome.trainers > outcome.upkeep
    print(f"{name}: {outcome.deaths} deaths, {outcome.upkeep} of them of upkeep")


def test_the_long_run_leaves_no_store_out() -> None:
    assert SHARES.keys() == PLACES.keys()
    assert sum(SHARES.values()) == pytest.approx(1.0)
