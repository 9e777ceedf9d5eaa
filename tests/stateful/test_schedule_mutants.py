"""The schedules notice mistakes: each is put into the real code and must violate an invariant."""

from __future__ import annotations

import pytest
from driver import Violation, run
from mutants import MUTANTS, Mutant

pytestmark = pytest.mark.usefixtures("scheduled")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mistake_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.make(monkeypatch)
    for seed in (*mutant.hints, *range(600)):
        try:
            run(seed)
        except Violation as violation:
            if str(violation).startswith(mutant.caught_as):
                return
            raise
    pytest.fail(f"not noticed: {mutant.mistake}")
