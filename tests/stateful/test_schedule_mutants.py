"""The schedules notice mistakes: each is put into the real code and must violate an invariant."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driver import run
from mutants import MUTANTS, Mutant
from turns import Violation

pytestmark = pytest.mark.usefixtures("scheduled")

# Seeds that are tried first. Any change to what a save does may move them; the search then takes seconds longer.
HINTS = {
    "marks_given_back": 9,
    "resumed_is_next_parent": 3,
    "lineage_of_this_life": 7,
    "look_after_the_attempt": 10,
    "fallback_by_ancestors": 3,
    "history_in_lineage": 5,
    "a_forgotten_checkpoint_is_not_damaged": 11,
    "markers": 4,
    "live_compaction_kept": 3,
    "gone_first": 3,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mistake_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.make(monkeypatch)
    for seed in (HINTS.get(mutant.name, 0), *range(300)):
        try:
            run(seed, events=mutant.events, mix=replace(mutant.mix) if mutant.mix else None)
        except Violation as violation:
            if str(violation).startswith(mutant.caught_as):
                return
            raise
    pytest.fail(f"not noticed: {mutant.mistake}")
