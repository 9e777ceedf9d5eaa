"""Stores that fail or hang, ranks that die or do different things: every rank learns it, nothing half is committed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rank_processes import Ranks, Returned

from incremental_ckpt import Repository, open_store
from incremental_ckpt.coordinator import coordinator


@pytest.mark.parametrize(
    ("failing", "key"),
    [(1, "data/*.safetensors"), (1, "data/*.json"), (0, "data/*"), (0, "manifests/*"), (2, "data/*.safetensors")],
)
def test_a_failed_store_of_one_rank_fails_the_save_on_all_and_its_rows_come_next(
    ranks: Ranks, tmp_path: Path, failing: int, key: str
) -> None:
    seen = ranks.run(3, "rank_troubles.a_store_that_fails", str(tmp_path), failing, key)
    for life in seen:
        assert life["waited"][0] == "SaveError"
        assert life["seqs"] == (1,)
        assert life["rows"] == 6  # 10, 11, 12 of the failed save and 20, 21, 22
    repository = Repository(open_store(tmp_path))
    assert [i.step for i in repository.checkpoints()] == [1, 3, 4]
    assert np.array_equal(repository.read_table("table"), seen[0]["table"])
    told = seen[0]["waited"][1]
    # Where the vote itself cannot be written, rank 0 learns no more than that it is missing.
    assert "no space left" in told or f"rank {failing} has not voted" in told


def test_a_store_that_is_deleted_fails_the_next_save_on_all_ranks_and_a_base_follows(
    ranks: Ranks, tmp_path: Path
) -> None:
    for seen in ranks.run(3, "rank_troubles.a_store_that_is_deleted", str(tmp_path / "store")):
        assert seen["waited"][0] == "SaveError"
        assert "step 3 (seq 3) committed nothing: what it counts from has gone" in seen["waited"][1]
        assert (seen["kind"], seen["resumed"], seen["same"]) == ("base", 5, True)


def test_a_failure_nobody_waited_for_is_told_to_all_ranks_at_the_next_meeting(ranks: Ranks, tmp_path: Path) -> None:
    for seen in ranks.run(3, "rank_troubles.a_failure_nobody_waited_for", str(tmp_path)):
        assert [kind for kind, _ in seen] == ["", "SaveError", "", ""]
        assert "no space left" in seen[1][1]
    assert [i.step for i in Repository(open_store(tmp_path)).checkpoints()] == [3, 4]


def test_a_store_that_hangs_on_one_rank_holds_nobody_up_for_longer_than_the_limit(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, "rank_troubles.a_store_that_hangs", str(tmp_path))
    for kind, text in first["seen"][:2]:
        assert kind == "SaveError"
        assert "rank 1 has not voted" in text
    assert second["seen"][0][0] == ""
    for kind, text in (first["seen"][2], *second["seen"][1:]):
        assert kind == "SaveError"
        assert "rank 1 is still writing" in text
    for life in (first, second):
        assert life["seqs"] == (1, 2)
        assert life["rows"] == 8  # of the three saves that failed and of the last step


def test_a_slow_store_of_one_rank_fails_nothing(ranks: Ranks, tmp_path: Path) -> None:
    for seen in ranks.run(3, "rank_troubles.a_store_that_is_slow", str(tmp_path)):
        assert not seen["done"]
        assert seen["seqs"] == (1,)
        assert seen["rows"] == [3, 3]


@pytest.mark.parametrize(
    ("dying", "save", "following"),
    [
        (1, "rank 1 has not voted on seq 2", "did not come to the meeting within 1.5 s: 1 (of 2"),
        (0, "rank 0 has not told the outcome of seq 2", "rank 1 waited in vain for rank 0 (at most 4.5 s)"),
    ],
)
def test_the_death_of_a_rank_in_a_save_ends_the_save_in_time_and_names_it(
    ranks: Ranks, tmp_path: Path, dying: int, save: str, following: str
) -> None:
    outcomes = ranks.outcomes(2, "rank_troubles.a_death_in_a_save", str(tmp_path), dying, seconds=30)
    assert outcomes[dying] is None
    survivor = outcomes[1 - dying]
    assert isinstance(survivor, Returned)
    for name, words in (("save", save), ("next", following)):
        assert survivor.value[name][0] == "SaveError"
        assert words in survivor.value[name][1]
    assert survivor.value["end"] == ("", "None")
    assert Repository(open_store(tmp_path)).listing().seqs == (1,)


def test_ranks_in_different_calls_are_told_and_absent_ones_named(ranks: Ranks, tmp_path: Path) -> None:
    for seen in ranks.run(3, "rank_troubles.different_calls", str(tmp_path)):
        assert seen["steps"][0] == seen["calls"][0] == "SaveError"
        assert "rank 0: save at step 5; rank 1: save at step 6; rank 2: save at step 7" in seen["steps"][1]
        assert "rank 1: settle" in seen["calls"][1]
        assert [kind for kind, _ in seen["absent"]] == ["SaveError"] * 2
        assert "did not come to the meeting within 2 s: 2 (of 3" in seen["absent"][0][1]
        assert seen["last"][0] == ""
        assert Repository(open_store(tmp_path)).manifest(seen["seqs"][-1]).step == 12


def test_ranks_that_are_not_alike_are_refused_on_all_of_them(ranks: Ranks, tmp_path: Path) -> None:
    for seen in ranks.run(3, "rank_troubles.different_ranks", str(tmp_path)):
        assert seen["table"][0] == seen["objects"][0] == seen["version"][0] == "MismatchError"
        assert "table table is 60 x 4 with weight (float32) on rank 0 and 61 x 4 with" in seen["table"][1]
        assert seen["dense"][0] == seen["optimizer"][0] == "MismatchError"
        assert "(2 with 5 numbers in all" in seen["dense"][1]
        assert "and 2 with 10 numbers" in seen["dense"][1]
        assert "60 x 4 with weight (float32), sum (float32) on rank 0 and 60 x 4 with weight" in seen["optimizer"][1]
        assert "reader" in seen["objects"][1]
        assert "scheduler" in seen["objects"][1]
        assert "0.0.1" in seen["version"][1]
        assert seen["store"][0] == "FormatError"
        assert "novel.txt" in seen["store"][1]
        assert not seen["written"]
        assert "nothing to divide by" in seen["state"][1]
        assert seen["saved"] == 1
        assert "nothing to divide by" in seen["loading"][1]
        assert seen["resumed"] == 2
        assert seen["fallback"] == 2
        assert seen["damaged"][0] == "CorruptionError"


def test_stores_that_are_not_shared_are_found_out(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, "rank_troubles.own_stores", str(tmp_path))
    for seen in (first, second):
        assert seen["saved"][0] == "SaveError"
        assert seen["seqs"] == ()
    assert f"finds no vote in its store ({tmp_path / '0'})" in first["saved"][1]
    assert "do all ranks write to this very store?" in first["saved"][1]
    assert "does it write to the same store" in second["saved"][1]


def test_a_resume_by_ranks_that_see_different_stores_is_refused_on_all_and_never_a_cold_start(
    ranks: Ranks, tmp_path: Path
) -> None:
    for rank, seen in enumerate(ranks.run(2, "rank_troubles.stores_that_some_see", str(tmp_path))):
        for number, words in enumerate(("rank 1 finds no seq 1 in", "other ranks find checkpoints up to seq 1")):
            kind, text = seen[f"only rank {number}"]
            assert kind == "NotFoundError"
            assert words in text
            assert "Do all ranks see the same store?" in text
        assert f"Rank {rank} looks into {tmp_path}" in seen["only rank 1"][1]
        assert seen["all"][0] == ""
        assert "step=1" in seen["all"][1]


@pytest.mark.parametrize("busy", ["defer", "skip"])
def test_rank_0_alone_decides_when_clocks_and_busy_stores_have_a_say(ranks: Ranks, tmp_path: Path, busy: str) -> None:
    seen = ranks.run(3, "rank_troubles.by_the_clock", str(tmp_path), busy)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == 6
    assert len([step for step in seen[0] if step > 18]) >= 2
    assert not [step for step in seen[0] if 6 < step < 18]
    assert sorted({i.step for i in Repository(open_store(tmp_path)).checkpoints()}) == seen[0]


def test_steps_of_which_none_is_due_are_local_and_what_all_ranks_hold_is_written_once_spread_over_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    for meetings, tensors in ranks.run(2, "rank_troubles.steps_between_meetings", str(tmp_path)):
        assert meetings == 0
        assert tensors == [1, 1]  # weight and bias of a linear layer


def test_rows_that_all_ranks_hold_are_written_once_and_come_back_on_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    first = ranks.run(3, "rank_troubles.plain_tables", str(tmp_path), 3)
    assert first[0]["kinds"] == ["base", "delta", "delta"]
    assert first[0]["rows"] == [60, 6, 6]  # each of three ranks looked up two rows; each changed row is written once
    assert first[0]["table_rows"] == 60
    second = ranks.run(2, "rank_troubles.plain_tables", str(tmp_path), 1)
    for life in second:
        assert np.array_equal(life["begun"], first[0]["ended"])
        assert life["kinds"] == ["delta"]
    assert np.array_equal(Repository(open_store(tmp_path)).read_table("table"), second[0]["ended"])


def test_ranks_that_were_started_and_not_connected_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # another test's group may still be there
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="init_process_group"):
        coordinator(1.0)
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(ValueError, match="0 ranks"):
        coordinator(1.0)
