"""The schedules notice mistakes: each is put into the real code and must violate an invariant."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driver import run
from mutants import MUTANTS, Mutant
from turns import Violation

pytestmark = pytest.mark.usefixtures("scheduled")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mistake_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.make(monkeypatch)
    for seed in range(300):
        try:
            run(seed, events=mutant.events, mix=replace(mutant.mix) if mutant.mix else None)
        except Violation as violation:
            if str(violation).startswith(mutant.caught_as):
                return
            raise
    pytest.fail(f"not noticed: {mutant.mistake}")
