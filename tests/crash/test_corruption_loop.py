"""Damage anywhere: a resume gives a typed error or a right state (the newest, or a true ancestor with a warning)."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from damages import Past, Victim, cuts, flips, judge, make_past, swaps
from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, CheckpointError, Repository
from incremental_ckpt.format import layout
from incremental_ckpt.storage import MemoryStore


@pytest.fixture(scope="module", params=["adagrad", "fused"])
def past(request: pytest.FixtureRequest) -> Past:
    return make_past(request.param)


@pytest.mark.parametrize("damage", [flips, cuts])
def test_damage_to_any_object_gives_a_typed_error_or_a_right_state(
    past: Past, damage: Any, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    run_layout = request.node.callspec.params["past"]
    victim = Victim(run_layout)
    cases = list(damage(past.objects))[:: 1 if run_layout == "adagrad" else 3]
    outcomes = [judge(past, victim, objects, what, caplog) for what, objects in cases]
    assert {"error", "newest", "ancestor"} >= set(outcomes)
    assert outcomes.count("ancestor") > 10, "the fallback is hardly tried"
    assert outcomes.count("newest") > 10, "objects that the newest does not need are damaged as well"
    print({o: outcomes.count(o) for o in set(outcomes)})


def test_swapped_objects_give_a_typed_error_or_a_right_state(caplog: pytest.LogCaptureFixture) -> None:
    past = make_past("adagrad")
    victim = Victim("adagrad")
    outcomes = [judge(past, victim, objects, what, caplog) for what, objects in list(swaps(past.objects))[::4]]
    assert outcomes.count("ancestor") > 10
    print({o: outcomes.count(o) for o in set(outcomes)})


def test_two_damaged_objects_give_a_typed_error_or_a_right_state(caplog: pytest.LogCaptureFixture) -> None:
    past = make_past("adagrad")
    victim = Victim("adagrad")
    manifests = [key for key in past.objects if not key.endswith(".safetensors")]
    for a, b in combinations(manifests, 2):
        damaged = dict(past.objects)
        damaged[a], damaged[b] = damaged[a][:-3], damaged[b][:-3]
        judge(past, victim, damaged, f"{a} and {b} cut", caplog)


def test_damage_in_the_newest_pack_falls_back_to_its_parent_and_names_the_pack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    past = make_past("adagrad")
    key = max(key for key in past.objects if key.endswith(".safetensors"))
    victim = Victim("adagrad")
    value = bytearray(past.objects[key])
    value[-1] ^= 1
    outcome = victim.resume({**past.objects, key: bytes(value)})
    assert not isinstance(outcome, CheckpointError)
    step, (event,) = outcome
    assert step == 5
    assert event.passed_over[0][0] == 6
    assert key in event.passed_over[0][1]


def test_a_branch_is_never_resumed_for_a_damaged_one_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    """Seq 4 is whole but was left behind by the job that resumed 3: without 5 and 6 the run stands at 3."""
    past = make_past("adagrad")
    victim = Victim("adagrad")
    for spoiled in ([5, 6], [5]):
        damaged = dict(past.objects)
        for key in damaged:
            if key.startswith(tuple(f"data/{seq:08d}" for seq in spoiled)) and key.endswith(".safetensors"):
                damaged[key] = damaged[key][:-1]
        outcome = victim.resume(damaged)
        assert not isinstance(outcome, CheckpointError)
        assert outcome[0] == 3
        assert_same(victim.run.copy(), past.states[3])


def test_a_step_is_resumed_although_another_manifest_is_damaged(caplog: pytest.LogCaptureFixture) -> None:
    past = make_past("adagrad")
    damaged = {**past.objects, layout.manifest_key(6): past.objects[layout.manifest_key(6)][:-1]}
    store = MemoryStore()
    for key, value in damaged.items():
        store.put(key, [value])
    run = Run("adagrad", 4)
    with Checkpointer(run.model, store, **run.arguments) as checkpointer:
        assert checkpointer.resume_from_checkpoint(step=2) is not None
        assert_same(run.copy(), past.states[2])
        with pytest.raises(CheckpointError):
            checkpointer.resume_from_checkpoint(step=6)


def test_check_names_every_object_that_a_resume_stumbles_over() -> None:
    past = make_past("adagrad")
    for what, objects in list(flips(past.objects))[::7]:
        key = what.split(" byte ")[0]
        if key.startswith(("resumes/", "repo.json")):
            continue
        store = MemoryStore()
        for name, value in objects.items():
            store.put(name, [value])
        report = Repository(store).check(deep=True)
        assert key in {p.key for p in report.problems}, what
