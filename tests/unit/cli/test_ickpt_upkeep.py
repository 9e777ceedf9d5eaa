"""The verbs that write, and diff: what they do, print and answer, on good, empty, damaged and foreign stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from incremental_ckpt import Repository, open_store
from incremental_ckpt.cli import CODES, USAGE
from incremental_ckpt.cli.commands import app
from incremental_ckpt.cli.upkeep import COMMANDS
from incremental_ckpt.errors import (
    ConflictError,
    CorruptionError,
    FormatError,
    MismatchError,
    NotFoundError,
    StorageError,
)

Ickpt = Callable[..., Any]


def snapshot(place: Path) -> dict[str, bytes]:
    return {str(f.relative_to(place)): f.read_bytes() for f in place.rglob("*") if f.is_file()}


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.unlink()
    path.write_bytes(raw)


def test_every_verb_is_there_and_explains_itself(ickpt: Ickpt) -> None:
    assert [command.name for command in COMMANDS] == ["compact", "prune", "export", "import", "diff"]
    listed = ickpt("--help").out
    for name, command in app.commands.items():
        assert f"  {name} " in listed
        assert command.short_help in listed
        explained = ickpt(name, "--help").out
        assert "--json" in explained
        assert f"\nExamples:\n  ickpt {name} " in explained
        assert max(map(len, explained.splitlines())) <= 80


def test_compact_writes_an_equivalent_and_then_has_nothing_to_do(ickpt: Ickpt, place: Path) -> None:
    answer = ickpt("compact", place, "--json")
    assert answer.code == 0
    found = answer.json
    assert {k: found[k] for k in ("seq", "chain", "complete", "missing", "rows")} == {
        "seq": 4, "chain": 4, "complete": True, "missing": [], "rows": 250,
    }  # fmt: skip
    assert found["bytes_read"] > 0
    assert found["bytes_written"] > 0
    assert ickpt("check", place, "--deep").code == 0
    assert [link["compacted"] for link in ickpt("show", place, "--json").json["chain"]] == [True]
    again = ickpt("compact", place)
    assert again.lines == [f"seq 4 of {place}: a resume reads a base already, nothing to do"]


def test_compact_takes_a_seq_and_a_bound(ickpt: Ickpt, place: Path) -> None:
    answer = ickpt("compact", place, "--seq", 2, "--memory", "64MiB")
    assert "seq 2" in answer.out
    assert "a chain of 2 has an equivalent base now" in answer.out


def test_processes_share_a_compaction(ickpt: Ickpt, place: Path) -> None:
    assert ickpt("compact", place, "--shard", "1/2").out.rstrip().endswith("not there yet: parts 0")
    assert ickpt("compact", place, "--shard", "0/2", "--json").json["complete"] is True


@pytest.mark.parametrize(
    "arguments",
    [("--memory", "1MiB"), ("--memory", "much"), ("--shard", "2/2"), ("--shard", "half"), ("--seq", "0")],
)
def test_compact_refuses_arguments_that_make_no_sense(ickpt: Ickpt, place: Path, arguments: tuple[str, str]) -> None:
    answer = ickpt("compact", place, *arguments)
    assert answer.code == USAGE
    assert arguments[0] in answer.err


@pytest.mark.parametrize(
    ("text", "size"), [("64MiB", 64 << 20), ("1GiB", 1 << 30), ("1.5 GB", 1_500_000_000), ("100000000", 10**8)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    from incremental_ckpt.cli.upkeep import _size

    assert _size(text) == size


def test_a_dry_run_shows_what_a_prune_would_do_and_touches_nothing(ickpt: Ickpt, place: Path) -> None:
    ickpt("compact", place)
    before = snapshot(place)
    answer = ickpt("prune", place, "--keep-last", 1, "--dry-run", "--json")
    assert answer.code == 0
    found = answer.json
    assert (found["executed"], found["kept"], found["wanted"], found["forgotten"]) == (False, [4], [4], [1, 2, 3])
    assert found["bytes"] == sum(r["bytes"] for r in found["removals"]) > 0
    assert {r["why"] for r in found["removals"]} == {"forgotten"}
    assert snapshot(place) == before
    assert "nothing was deleted" in ickpt("prune", place, "--keep-last", 1, "--dry-run").out


def test_a_prune_frees_what_its_dry_run_said(ickpt: Ickpt, place: Path) -> None:
    ickpt("compact", place)
    said = ickpt("prune", place, "--keep-last", 1, "--dry-run", "--json").json["bytes"]
    found = ickpt("prune", place, "--keep-last", 1, "--json").json
    assert (found["executed"], found["forgotten"], found["bytes_freed"]) == (True, [1, 2, 3], said)
    assert [c["seq"] for c in ickpt("ls", place, "--json").json] == [4]
    assert ickpt("check", place, "--deep").code == 0


def test_a_prune_keeps_the_chain_and_says_why(ickpt: Ickpt, place: Path) -> None:
    lines = ickpt("prune", place, "--keep-last", 1).lines
    assert lines[:3] == [
        "keeps    4",
        "needs    1-3: deltas among those above are read from these (`ickpt compact` of the deltas ends that)",
        "forgot   none",
    ]


def test_a_prune_tells_what_is_in_use_from_what_is_needed(ickpt: Ickpt, place: Path) -> None:
    """The worst is wanted, a job goes on from the newest: neither is read from the other."""
    ickpt("compact", place, "--seq", 2)
    ickpt("compact", place)
    assert ickpt("prune", place, "--keep-best", "auc:1:min", "--dry-run").lines[:2] == [
        "keeps    2",
        "in use   4: the newest, or what a job goes on from, and what that is read from",
    ]
    found = ickpt("prune", place, "--keep-best", "auc:1:min", "--json").json
    assert (found["kept"], found["wanted"], found["needed"], found["in_use"]) == ([2, 4], [2], [], [4])


def test_a_prune_says_that_what_is_damaged_and_young_stays(ickpt: Ickpt, place: Path) -> None:
    ickpt("compact", place, "--seq", 2)
    ickpt("compact", place)
    repository = Repository(open_store(place))
    (rank,) = repository.rank_manifests(repository.manifest(3))
    (place / rank.packs[0].key).unlink()
    assert ickpt("prune", place, "--keep-best", "auc:1:min", "--dry-run").lines[:3] == [
        "keeps    2",
        "in use   4: the newest, or what a job goes on from, and what that is read from",
        "damaged  3: not counted (`ickpt check` tells more); 3 stay, since they might be mended",
    ]


def test_a_prune_keeps_by_metric_and_by_steps(ickpt: Ickpt, place: Path) -> None:
    for seq in (2, 3, 4):
        ickpt("compact", place, "--seq", seq)
    found = ickpt("prune", place, "--keep-best", "auc:1:min", "--keep-every", 30, "--json").json
    assert found["wanted"] == [2, 3]
    assert found["forgotten"] == [1]


@pytest.mark.parametrize(
    "arguments", [(), ("--keep-last", "0"), ("--keep-best", "auc"), ("--keep-best", "auc:0"), ("--keep-best", "a:1:up")]
)
def test_a_prune_that_is_not_told_what_to_keep_does_nothing(
    ickpt: Ickpt, place: Path, arguments: tuple[str, ...]
) -> None:
    before = snapshot(place)
    assert ickpt("prune", place, *arguments).code == USAGE
    assert snapshot(place) == before


def test_a_prune_that_cannot_delete_says_so_and_fails(
    ickpt: Ickpt, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from incremental_ckpt.storage import LocalStore

    def refuse(self: LocalStore, keys: object) -> None:
        raise StorageError("permission denied")

    ickpt("compact", place)
    monkeypatch.setattr(LocalStore, "delete", refuse)
    answer = ickpt("prune", place, "--keep-last", 1)
    assert answer.code == CODES[StorageError]
    assert "the next prune tries again" in answer.err
    monkeypatch.undo()
    assert ickpt("prune", place, "--keep-last", 1).code == 0


def test_diff_counts_the_rows_that_changed(ickpt: Ickpt, place: Path) -> None:
    found = ickpt("diff", place, 1, 3, "--json").json
    assert [(d["table"], d["what"], d["rows"], d["changed"]) for d in found] == [
        ("items", "changed", 50, 8), ("users", "changed", 200, 8)
    ]  # fmt: skip
    assert found[1]["fields"] == {"weight": 8, "sum": 8}
    table = ickpt("diff", place, 1, 3).lines
    assert table[0].split() == ["table", "rows", "changed", "of", "all", "weight", "sum"]
    assert not any(line.endswith(" ") for line in table)
    assert table[2].split() == ["users", "200", "8", "4.00%", "8", "8"]


@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
def test_an_export_begins_another_store(ickpt: Ickpt, place: Path, tmp_path: Path, form: str) -> None:
    out, begun = tmp_path / "out", tmp_path / "new" / "run"
    found = ickpt("export", place, out, "--format", form, "--optimizer", "--json").json
    assert (found["seq"], found["step"], found["tables"], found["format"]) == (4, 40, 2, form)
    answer = ickpt("import", out, begun, "--step", 40, "--json").json
    assert answer["tables"] == ["items", "users"]
    assert (answer["checkpoint"]["step"], answer["optimizer"]) == (40, True)
    old, new = Repository(open_store(place)), Repository(open_store(begun))
    for table in ("users", "items"):
        for field in ("weight", "sum"):
            assert new.read_table(table, field=field).tobytes() == old.read_table(table, field=field).tobytes()


def test_an_export_of_an_older_checkpoint_is_a_plain_state_dict(ickpt: Ickpt, place: Path, tmp_path: Path) -> None:
    answer = ickpt("export", place, tmp_path / "m.pt", "--seq", 2)
    assert answer.out.startswith("seq 2 (step 20) is in ")
    assert torch.load(tmp_path / "m.pt", weights_only=True)["users.weight"].shape == (200, 8)


def test_an_import_says_which_tensors_are_tables(ickpt: Ickpt, tmp_path: Path) -> None:
    torch.save({"users.weight": torch.zeros(5, 4), "top.weight": torch.zeros(1, 4)}, tmp_path / "m.pt")
    answer = ickpt("import", tmp_path / "m.pt", tmp_path / "a")
    assert answer.code == CODES[MismatchError]
    assert "name them (tables=, --table)" in answer.err
    assert not (tmp_path / "a" / "manifests").exists(), "nothing is committed on a guess"
    assert (
        ickpt("import", tmp_path / "m.pt", tmp_path / "a", "--no-tables").lines[0].endswith("0 tables, 2 other tensors")
    )
    lines = ickpt("import", tmp_path / "m.pt", tmp_path / "b", "--table", "users").lines
    assert "  table users" in lines
    assert ickpt("import", tmp_path / "m.pt", tmp_path / "b").code == CODES[ConflictError]


def commands(place: Path, out: Path) -> list[tuple[object, ...]]:
    return [("compact", place), ("prune", place, "--keep-last", 1), ("export", place, out), ("diff", place, 1, 2)]


def test_an_empty_store_has_nothing_for_them(ickpt: Ickpt, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    codes = [ickpt(*command).code for command in commands(tmp_path / "empty", tmp_path / "out")]
    assert codes == [CODES[NotFoundError], 0, CODES[NotFoundError], CODES[NotFoundError]]
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_path_that_is_not_there_is_not_made(ickpt: Ickpt, tmp_path: Path) -> None:
    for command in commands(tmp_path / "nowhere", tmp_path / "out"):
        assert ickpt(*command).code == CODES[NotFoundError]
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_folder_is_left_alone(ickpt: Ickpt, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_bytes(b"x")
    torch.save({"a.weight": torch.zeros(1, 1)}, tmp_path / "m.pt")
    everything = [*commands(tmp_path / "photos", tmp_path / "out"), ("import", tmp_path / "m.pt", tmp_path / "photos")]
    for command in everything:
        assert ickpt(*command).code == CODES[FormatError]
    assert [f.name for f in (tmp_path / "photos").iterdir()] == ["1.jpg"]


def test_a_damaged_store_is_named_and_nothing_is_deleted(ickpt: Ickpt, place: Path, tmp_path: Path) -> None:
    repository = Repository(open_store(place))
    (rank,) = repository.rank_manifests(repository.manifest(2))
    weights = next(entry.at for entry in rank.shards[0].entries if entry.field == "weight")
    flip(place / rank.packs[weights.pack].key, weights.begin)
    before = snapshot(place)
    for command in (("compact", place), ("export", place, tmp_path / "out"), ("diff", place, 1, 4)):
        answer = ickpt(*command)
        assert answer.code == CODES[CorruptionError]
        assert "data/00000002-" in answer.err
    (place / rank.packs[weights.pack].key).unlink()
    for command in (("compact", place), ("export", place, tmp_path / "out"), ("diff", place, 1, 4)):
        answer = ickpt(*command)
        assert answer.code == CODES[CorruptionError]
        assert "data/00000002-" in answer.err
    flip(place / "manifests" / "00000004.json", 90)
    assert ickpt("prune", place, "--keep-last", 1).code == CODES[CorruptionError]
    assert snapshot(place).keys() >= before.keys() - {rank.packs[weights.pack].key}
