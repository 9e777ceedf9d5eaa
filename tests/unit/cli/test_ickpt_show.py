"""``ickpt show`` on a terminal of any width, and of a checkpoint of which not all can be read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from incremental_ckpt import Checkpointer, Repository, open_store
from incremental_ckpt.cli import facts, tables
from incremental_ckpt.compaction import compact
from incremental_ckpt.format.sealed import seal, unseal

Ickpt = Callable[..., Any]
BASE = "manifests/00000004.base.json"


@pytest.fixture(scope="module")
def with_two_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tables whose rows have a weight and two states each."""
    place = tmp_path_factory.mktemp("runs") / "18"
    model = torch.nn.ModuleDict({name: torch.nn.EmbeddingBag(20_000, 32, sparse=True) for name in ("item", "user")})
    rows = torch.optim.SparseAdam(list(model.parameters()))
    with Checkpointer(model, place, optimizer=rows) as ckpt:
        for bag in model.values():
            bag(torch.tensor([[1, 2]])).sum().backward()
        with torch.sparse.check_sparse_tensor_invariants(True):  # undecided, torch warns of it
            rows.step()
        ckpt.save_checkpoint(1).wait()
    return place


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(width))


def show(place: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    tables.show_checkpoint("runs/18", facts.checkpoint_facts(Repository(open_store(place)), None))
    return capfd.readouterr().out.splitlines()


@pytest.mark.parametrize("width", range(80, 140, 12))
def test_it_is_as_wide_as_the_terminal_at_most_and_names_what_is_left_out(
    with_two_states: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    on_a_terminal(monkeypatch, width)
    lines = show(with_two_states, capfd)
    assert max(map(len, lines)) <= width
    header = next(line for line in lines if line.startswith("table "))
    left_out = [name for name in ("rows", "cols", "shards", "fields", "carried", "of all") if name not in header]
    told = [line for line in lines if line.startswith("too narrow for: ")]
    assert told == ([f"too narrow for: {', '.join(left_out)} (--json, or a pipe, has all)"] if left_out else [])
    assert any("weight, exp_avg, exp_avg_sq float32[32]" in line for line in lines)


def test_a_pipe_has_all_columns(with_two_states: Path, ickpt: Ickpt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    header = next(line for line in ickpt("show", with_two_states).lines if line.startswith("table "))
    assert header.split() == ["table", "rows", "cols", "shards", "fields", "carried", "of", "all", "size"]


def test_prose_is_broken_between_words_on_a_terminal_only(
    ickpt: Ickpt, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(place / "manifests/00000002.json")
    piped = ickpt("show", place).lines
    assert max(map(len, piped)) > 200
    on_a_terminal(monkeypatch, 80)
    lines = show(place, capfd)
    assert max(map(len, lines)) <= 80
    assert [word for line in lines for word in line.split()][4:] == [w for line in piped for w in line.split()][4:]


def spoil(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[200] ^= 1
    path.unlink()
    path.write_bytes(raw)


def make_newer(path: Path) -> None:
    members = unseal(path.read_bytes(), str(path))
    del members["digest"]
    path.unlink()
    path.write_bytes(seal(members | {"format": 2}))


@pytest.mark.parametrize(
    ("damage", "code", "why"),
    [(spoil, 5, f"{BASE} is damaged: its digest does not match"), (make_newer, 6, f"{BASE} is in format 2")],
    ids=["damaged", "newer"],
)
def test_past_an_equivalent_base_that_cannot_be_read_it_shows_the_chain(
    ickpt: Ickpt, place: Path, damage: Callable[[Path], None], code: int, why: str
) -> None:
    before = ickpt("show", place, "--json").json
    compact(Repository(open_store(place)))
    damage(place / BASE)
    answer = ickpt("show", place, "--json")
    assert answer.code == code
    assert answer.err.startswith(f"ickpt: not all of seq 4 can be read: {why}")
    (problem,) = answer.json.pop("problems")
    assert (problem["seq"], problem["key"]) == (4, BASE)
    assert problem["what"].startswith(why)
    assert answer.json | {"problems": []} == before
    drawn = ickpt("show", place).out
    assert f"problems  (`ickpt check` tells what can be restored)\n  seq 4  {BASE}\n    {why}" in drawn
    assert "users" in drawn


def test_a_chain_that_cannot_be_read_on_is_shown_as_far_as_it_can(ickpt: Ickpt, place: Path) -> None:
    (place / "manifests/00000002.json").unlink()
    answer = ickpt("show", place, "--json")
    assert (answer.code, [link["seq"] for link in answer.json["chain"]]) == (5, [3, 4])
    assert answer.err == "ickpt: not all of seq 4 can be read: manifests/00000002.json is missing\n"
    assert "chain  (what can be read of it: no base)" in ickpt("show", place).out


def test_a_rank_manifest_that_is_damaged_is_named_and_the_rest_is_shown(ickpt: Ickpt, place: Path) -> None:
    path = next(place.glob("data/00000004-*/rank-00000.json"))
    spoil(path)
    answer = ickpt("show", place, "--json")
    assert (answer.code, answer.json["tables"], answer.json["state"]) == (5, [], [])
    assert [p["key"] for p in answer.json["problems"]] == [str(path.relative_to(place))]
    assert [link["seq"] for link in answer.json["chain"]] == [1, 2, 3, 4]


def test_a_parent_of_another_run_is_named(ickpt: Ickpt, place: Path, with_two_states: Path) -> None:
    path = place / "manifests/00000001.json"
    path.unlink()
    shutil.copy(with_two_states / "manifests/00000001.json", path)
    answer = ickpt("show", place, "--json")
    assert (answer.code, [link["seq"] for link in answer.json["chain"]]) == (5, [2, 3, 4])
    assert "objects of two runs are mixed" in answer.json["problems"][0]["what"]


def test_a_prune_that_passes_meanwhile_is_no_damage(ickpt: Ickpt, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain goes away, since a compaction has come: seen once without it, it is looked at again."""
    real, calls = facts._facts, []

    def passed_by(repository: Repository, seq: int) -> facts.CheckpointFacts:
        if not calls:
            (place / "manifests/00000002.json").rename(place / "kept")
        found = real(repository, seq)
        if not calls:
            (place / "kept").rename(place / "manifests/00000002.json")
            compact(Repository(open_store(place)))
        calls.append(found.problems)
        return found

    monkeypatch.setattr(facts, "_facts", passed_by)
    answer = ickpt("show", place, "--json")
    assert (answer.code, answer.json["problems"]) == (0, [])
    assert [len(problems) for problems in calls] == [1, 0]
