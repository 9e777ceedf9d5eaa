"""Damage anywhere, over every store: a typed error or a right state. ``ICKPT_SEARCH=50`` looks at all of it."""

from __future__ import annotations

import os
import random
from itertools import chain
from pathlib import Path

import pytest
from damages import Past, Victim, cuts, flips, judge, make_past, swaps
from places import BUCKET_ON_LOOPBACK, PLACES

DAMAGES = {"memory": 60, "local": 24, "fsspec-memory": 40, "fsspec-file": 24, "s3": 14}
SEARCH = int(os.environ.get("ICKPT_SEARCH", "1"))


@pytest.fixture(scope="module")
def past() -> Past:
    return make_past("adagrad")


@pytest.fixture(scope="module", autouse=True)
def _bucket() -> object:
    yield
    BUCKET_ON_LOOPBACK.stop()


@pytest.mark.parametrize("name", PLACES)
def test_damage_over_any_store_gives_a_typed_error_or_a_right_state(
    name: str, past: Past, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cases = [*chain(flips(past.objects), cuts(past.objects), swaps(past.objects))]
    cases = random.Random(5).sample(cases, min(len(cases), DAMAGES[name] * SEARCH))
    with PLACES[name](tmp_path) as open_again:
        victim = Victim("adagrad", open_again())
        outcomes = [judge(past, victim, objects, what, caplog) for what, objects in cases]
    assert outcomes.count("ancestor") > 0, "the fallback is hardly tried"
    assert outcomes.count("newest") > 0, "objects that the newest does not need are damaged as well"
    print(f"{name}: {len(cases)} damages, { {o: outcomes.count(o) for o in sorted(set(outcomes))} }")
