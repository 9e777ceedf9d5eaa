"""What the verbs print, as text and as JSON, and the exit code of everything that can go wrong."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from incremental_ckpt import Checkpointer, Repository, errors, open_store
from incremental_ckpt.cli import CODES, INTERRUPTED, PIPE_CLOSED, UNEXPECTED, USAGE, catalogue, facts, main
from incremental_ckpt.cli.commands import app
from incremental_ckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptionError,
    FormatError,
    MismatchError,
    NotFoundError,
    SaveError,
    StorageError,
)
from incremental_ckpt.format import layout
from incremental_ckpt.format.manifest import Lineage, Manifest, RankRef
from incremental_ckpt.format.sealed import digest_of, seal
from incremental_ckpt.storage import Store

Ickpt = Callable[..., Any]
VERBS = ("ls", "show", "check")
NEWEST = "manifests/00000004.json"


def overwrite(path: Path, raw: bytes) -> None:
    path.unlink()
    path.write_bytes(raw)


def rewrite(place: Path, seq: int, **members: Any) -> None:
    """Replace a manifest by one that says something else and is whole (a newest one: nothing names its digest)."""
    manifest = Repository(open_store(place)).manifest(seq)
    overwrite(place / manifest.key, replace(manifest, **members).to_bytes())


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    overwrite(path, bytes(raw))


def packs(place: Path, seq: int) -> list[Path]:
    return sorted(place.glob(f"data/{seq:08d}-*/*.safetensors"))


def test_ls_json_has_what_the_run_saved(ickpt: Ickpt, place: Path) -> None:
    answer = ickpt("ls", place, "--json")
    assert answer.code == 0
    found = answer.json
    assert [
        (c["seq"], c["step"], c["kind"], c["parent"], c["rows"], c["table_rows"], c["epoch"], c["world_size"])
        for c in found
    ] == [
        (1, 10, "base", None, 250, 250, 0, 1),
        (2, 20, "delta", 1, 8, 250, 1, 1),
        (3, 30, "delta", 2, 8, 250, 1, 1),
        (4, 40, "delta", 3, 8, 250, 2, 1),
    ]
    for checkpoint in found:
        on_disk = sum(f.stat().st_size for f in place.glob(f"data/{checkpoint['seq']:08d}-*/rank-*"))
        assert checkpoint["bytes"] == on_disk
        assert checkpoint["created"].endswith("Z")
        assert datetime.fromisoformat(checkpoint["created"]).utcoffset() == timedelta(0)
        assert re.fullmatch("[0-9a-f]{16}", checkpoint["job"])
        assert re.fullmatch("[0-9a-f]{16}", checkpoint["attempt"])


def test_numbers_that_json_lacks_are_null(ickpt: Ickpt, place: Path) -> None:
    found = ickpt("ls", place, "--json").json
    assert [c["loss"] for c in found] == [0.1, 0.05, None, 0.025]
    assert [c["metrics"] for c in found] == [{}, *({"auc": auc, "lift": None} for auc in (0.7, 0.8, 0.9))]
    rewrite(place, 4, environment={"speed": {"$float": "nan"}, "threads": [1, float("inf")]})
    assert ickpt("show", place, "--json").json["environment"] == {"speed": None, "threads": [1, None]}


def test_ls_aligns_its_columns_and_leaves_no_space_at_the_end(ickpt: Ickpt, place: Path) -> None:
    lines = ickpt("ls", place).lines
    assert lines[0].split() == [
        "seq", "step", "kind", "parent", "rows", "of", "all", "size", "epoch", "loss", "auc", "lift", "created", "(UTC)"
    ]  # fmt: skip
    assert len({len(line) for line in lines[:5]}) == 1
    assert not any(line.endswith(" ") for line in lines)
    assert lines[2].split()[:6] == ["2", "20", "delta", "1", "8", "3.20%"]
    assert lines[3].split()[9:12] == ["nan", "0.8", "inf"]
    assert lines[1].split()[10:12] == ["-", "-"]
    assert lines[5].startswith("4 checkpoints, ")


def test_ls_leaves_out_columns_that_nobody_filled(ickpt: Ickpt, place: Path) -> None:
    shutil.rmtree(place / "manifests")
    (place / "manifests").mkdir()
    answer = ickpt("ls", place)
    assert (answer.code, answer.out) == (0, f"{place} holds no checkpoint yet\n")


def test_ls_shows_at_most_four_metrics_and_says_how_many_more_there_are(ickpt: Ickpt, place: Path) -> None:
    rewrite(place, 4, metrics={f"m{n}": float(n) for n in range(9)})
    lines = ickpt("ls", place).lines
    assert "m1" in lines[0]
    assert "m2" not in lines[0]
    assert lines[-1].endswith("; 7 more metrics (--json)")


def test_ls_lists_the_others_when_a_manifest_is_damaged(ickpt: Ickpt, place: Path) -> None:
    flip(place / "manifests/00000002.json", 200)
    answer = ickpt("ls", place)
    assert answer.code == 5
    assert "seq 2 cannot be read: manifests/00000002.json is damaged" in answer.err
    assert [line.split()[0] for line in answer.lines[1:5]] == ["1", "2", "3", "4"]
    assert answer.lines[2].split()[:3] == ["2", "-", "unreadable"]
    assert "3 checkpoints" in answer.lines[5]
    assert "1 unreadable" in answer.lines[5]
    as_json = ickpt("ls", place, "--json")
    assert (as_json.code, [c["seq"] for c in as_json.json]) == (5, [1, 3, 4])


def test_ls_says_how_many_more_are_unreadable(ickpt: Ickpt, place: Path) -> None:
    for seq in (1, 2, 3, 4):
        flip(place / f"manifests/0000000{seq}.json", 200)
    answer = ickpt("ls", place)
    assert answer.code == 5
    assert "seq 1 cannot be read (and 3 more; `ickpt check` names them all)" in answer.err


def test_show_without_a_number_shows_the_newest(ickpt: Ickpt, place: Path) -> None:
    assert ickpt("show", place, "--json").json["seq"] == 4
    assert ickpt("show", place).lines[0] == f"checkpoint 4 of {place}"


def test_show_json_has_all_that_ls_has_and_chain_tables_state_and_environment(ickpt: Ickpt, place: Path) -> None:
    found = ickpt("show", place, "--seq", 3, "--json").json
    listed = ickpt("ls", place, "--json").json[2]
    assert {name: found[name] for name in listed} == listed
    assert [(link["seq"], link["step"], link["kind"], link["rows"], link["compacted"]) for link in found["chain"]] == [
        (1, 10, "base", 250, False),
        (2, 20, "delta", 8, False),
        (3, 30, "delta", 8, False),
    ]
    assert [(t["name"], t["rows"], t["cols"], t["shards"], t["rows_carried"]) for t in found["tables"]] == [
        ("items", 50, 4, 1, 4),
        ("users", 200, 8, 1, 4),
    ]
    users = found["tables"][1]
    assert users["fields"] == [
        {"name": "weight", "dtype": "float32", "width": 8, "codecs": ["raw"]},
        {"name": "sum", "dtype": "float32", "width": 8, "codecs": ["raw"]},
    ]
    # Four rows of two fields of 8 floats, and the row ids.
    assert 4 * 2 * 8 * 4 < users["bytes"] < 4 * 2 * 8 * 4 + 100
    state = {s["name"]: s for s in found["state"]}
    assert {"dense", "optimizer", "rng"} <= state.keys()
    assert state["dense"] == {"name": "dense", "ranks": 1, "tensors": 2, "bytes": 13 * 4}
    assert found["environment"]["world_size"] == 1
    assert found["digest"] == Repository(open_store(place)).manifest(3).digest


def test_show_draws_the_same(ickpt: Ickpt, place: Path) -> None:
    out = ickpt("show", place, "--seq", 3).out
    for line in (
        r"  step +30",
        r"  kind +delta on 2",
        r"  loss +nan",
        r"  auc +0\.8",
        r"  rows +8 of 250 \(3\.20%\)",
        r" +2 +20 +delta +8 +[0-9.]+ kB",
        r"users +200 +8 +1 +weight, sum float32\[8\] +4 +2\.00% +[0-9]+ B",
        r"dense +1 +2 +52 B",
        r"  world_size +1",
    ):
        assert re.search(f"^{line}$", out, re.MULTILINE), line


def test_show_says_where_a_chain_begins_at_an_equivalent_base(ickpt: Ickpt, place: Path) -> None:
    base = Repository(open_store(place)).manifest(3)
    equivalent = replace(base, kind="base", parent=None, next_parent=None, of=base.digest)
    (place / "manifests/00000003.base.json").write_bytes(equivalent.to_bytes())
    found = ickpt("show", place, "--json").json["chain"]
    assert [(link["seq"], link["kind"], link["compacted"]) for link in found] == [
        (3, "delta", True),
        (4, "delta", False),
    ]
    assert re.search(r"^ +3 +30 +equivalent base", ickpt("show", place).out, re.MULTILINE)


def test_a_long_chain_is_drawn_with_its_ends_and_the_json_has_all_of_it(
    ickpt: Ickpt, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = facts.checkpoint_facts

    def longer(repository: Repository, seq: int | None) -> facts.CheckpointFacts:
        found = real(repository, seq)
        chain = tuple(replace(found.chain[-1], seq=n) for n in range(1, 101))
        return replace(found, chain=chain)

    monkeypatch.setattr(facts, "checkpoint_facts", longer)
    out = ickpt("show", place).out
    drawn = out[out.index("\nchain") : out.index("\ntables")].splitlines()[3:]
    assert [line.split()[0] for line in drawn if line] == ["1", "2", "...", *map(str, range(93, 101))]
    assert drawn[2].split() == ["...", "...", "90", "more"]
    assert [link["seq"] for link in ickpt("show", place, "--json").json["chain"]] == list(range(1, 101))


def test_show_of_an_unknown_number_names_those_there_are(ickpt: Ickpt, place: Path) -> None:
    answer = ickpt("show", place, "--seq", 9)
    assert (answer.code, answer.out) == (3, "")
    assert "no checkpoint 9; it has 1 to 4" in answer.err


def test_show_of_a_forgotten_number_is_not_damage(ickpt: Ickpt, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prune passes between finding the checkpoint and reading it."""
    real = facts._facts
    attempt = packs(place, 4)[0].parent

    def pruned(repository: Repository, seq: int) -> facts.CheckpointFacts:
        (place / "manifests/00000004.gone.json").write_bytes(
            seal({"format": 1, "seq": 4, "created": "2026-01-31T12:00:00.000000Z"})
        )
        shutil.rmtree(attempt, ignore_errors=True)
        return real(repository, seq)

    monkeypatch.setattr(facts, "_facts", pruned)
    answer = ickpt("show", place, "--seq", 4)
    assert answer.code == 3
    assert "no checkpoint 4; it has 1 to 3" in answer.err


def test_show_names_the_damaged_object(ickpt: Ickpt, place: Path) -> None:
    flip(place / NEWEST, 100)
    answer = ickpt("show", place)
    assert answer.code == 5
    assert NEWEST in answer.err
    assert ickpt("show", place, "--seq", 3).code == 0


def test_check_of_a_whole_store(ickpt: Ickpt, place: Path) -> None:
    for deep in (False, True):
        answer = ickpt("check", place, "--json", *(["--deep"] if deep else []))
        found = answer.json
        assert (answer.code, found["ok"], found["deep"], found["checkpoints"]) == (0, True, deep, 4)
        assert (found["restorable"], found["resumes"], found["problems"]) == ([1, 2, 3, 4], 4, [])
        assert found["objects"] > 8
    assert "all can be restored: 1-4" in ickpt("check", place).out


def test_check_names_a_missing_pack_and_what_a_resume_will_do(ickpt: Ickpt, place: Path) -> None:
    lost = packs(place, 3)[0]
    lost.unlink()
    key = str(lost.relative_to(place))
    answer = ickpt("check", place)
    assert answer.code == 5
    assert f"2 of 4 checkpoints in {place} cannot be restored; the first problem: {key}: missing" in answer.err
    assert f"  seq 3  {key}\n    missing\n" in answer.out
    assert "  whole:   1-2\n  damaged: 3-4\n" in answer.out
    assert "a resume passes over 3-4 by itself and goes on from seq 2 (step 20)" in answer.out
    assert "copy of the store" in answer.out
    found = ickpt("check", place, "--json")
    assert found.code == 5
    assert found.json["problems"] == [{"seq": 3, "key": key, "what": "missing", "newer": False}]
    assert (found.json["ok"], found.json["restorable"], found.json["damaged"]) == (False, [1, 2], [3, 4])
    assert found.json["resumes"] == 2


def test_only_a_deep_check_reads_the_rows(ickpt: Ickpt, place: Path) -> None:
    flip(packs(place, 4)[-1], -1)
    shallow, deep = ickpt("check", place), ickpt("check", place, "--deep")
    assert shallow.code == 0
    assert "--deep also reads all rows" in shallow.out
    assert deep.code == 5
    assert "with every checksum" in deep.out
    assert "a resume passes over 4 by itself and goes on from seq 3 (step 30)" in deep.out


def test_a_damaged_base_is_one_problem_for_all_its_deltas(ickpt: Ickpt, place: Path) -> None:
    flip(place / "manifests/00000001.json", 100)
    answer = ickpt("check", place)
    assert answer.code == 5
    assert answer.out.count("manifests/00000001.json is damaged") == 1
    assert "  seq 1-4  manifests/00000001.json\n" in answer.out
    assert "nothing can be resumed from this store" in answer.out
    assert ickpt("check", place, "--json").json["resumes"] is None


def test_check_names_a_manifest_that_lies_in_the_place_of_another(ickpt: Ickpt, place: Path) -> None:
    overwrite(place / NEWEST, (place / "manifests/00000001.json").read_bytes())
    answer = ickpt("check", place)
    assert answer.code == 5
    assert f"  seq 4  {NEWEST}\n" in answer.out
    assert "swapped" in answer.out


def test_check_tells_of_whole_checkpoints_that_no_resume_falls_back_to(ickpt: Ickpt, place: Path) -> None:
    """The newest job started afresh: what is whole belongs to a branch that it has left."""
    newest = Repository(open_store(place)).manifest(4)
    job = "f" * 16
    rewrite(place, 4, job=job, lineage=(newest.lineage[0], Lineage(job, 4, 0)))
    packs(place, 4)[0].unlink()
    answer = ickpt("check", place)
    assert answer.code == 5
    assert "whole:   1-3" in answer.out
    assert "a resume fails: none of the newest checkpoint's ancestors is whole" in answer.out
    assert "resume_from_checkpoint(step=...)" in answer.out


def test_check_says_when_the_newest_is_whole_and_an_older_one_is_not(ickpt: Ickpt, place: Path) -> None:
    """As after a base: the newest does not need what is damaged."""
    (place / "manifests/00000003.base.json").write_bytes(equivalent_of_base(place).to_bytes())
    packs(place, 2)[0].unlink()
    answer = ickpt("check", place)
    assert answer.code == 5
    assert "The newest checkpoint, seq 4 (step 40), is whole: a resume takes it" in answer.out
    assert "Only 2 cannot be gone back to" in answer.out


def equivalent_of_base(place: Path) -> Manifest:
    """An equivalent base for seq 3 that an attempt of seq 3 wrote: here the rows of seq 1 serve."""
    repository = Repository(open_store(place))
    first, third = repository.manifest(1), repository.manifest(3)
    attempt = "c" * 16
    rank = repository.rank_manifests(first)[0]
    moved = []
    for index, pack in enumerate(rank.packs):
        key = layout.pack_key(3, attempt, 0, index)
        (place / key).parent.mkdir(exist_ok=True)
        shutil.copy(place / pack.key, place / key)
        moved.append(replace(pack, key=key))
    raw = replace(rank, seq=3, attempt=attempt, packs=tuple(moved)).to_bytes()
    key = layout.rank_manifest_key(3, attempt, 0)
    (place / key).write_bytes(raw)
    ref = RankRef(key, len(raw), digest_of(raw))
    return replace(
        third, kind="base", parent=None, next_parent=None, of=third.digest, ranks=(ref,), totals=first.totals
    )


def test_an_empty_folder_is_an_empty_store(ickpt: Ickpt, tmp_path: Path) -> None:
    listed, checked, shown = (ickpt(verb, tmp_path) for verb in ("ls", "check", "show"))
    assert (listed.code, listed.out) == (0, f"{tmp_path} holds no checkpoint yet\n")
    assert (checked.code, checked.out) == (0, f"{tmp_path} holds no checkpoint yet: nothing to check\n")
    assert (shown.code, shown.out) == (3, "")
    assert ickpt("ls", tmp_path, "--json").json == []
    found = ickpt("check", tmp_path, "--json").json
    assert (found["ok"], found["checkpoints"], found["resumes"]) == (True, 0, None)


@pytest.mark.parametrize("verb", VERBS)
def test_a_path_that_does_not_exist_is_not_an_empty_store(ickpt: Ickpt, tmp_path: Path, verb: str) -> None:
    answer = ickpt(verb, tmp_path / "runs" / "71", "--json")
    assert (answer.code, answer.out) == (3, "")
    assert "runs/71 does not exist" in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_foreign_folder_is_a_format_error(ickpt: Ickpt, tmp_path: Path, verb: str) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    answer = ickpt(verb, tmp_path)
    assert (answer.code, answer.out) == (6, "")
    assert "not a repository" in answer.err


@pytest.mark.parametrize("verb", VERBS)
def test_a_newer_format_is_a_format_error(ickpt: Ickpt, place: Path, verb: str) -> None:
    overwrite(place / "repo.json", seal({"format": 2, "features": []}))
    answer = ickpt(verb, place)
    assert (answer.code, answer.out) == (6, "")
    assert "upgrade" in answer.err


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_is_no_store(ickpt: Ickpt, tmp_path: Path, verb: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    answer = ickpt(verb, tmp_path / "file")
    assert (answer.code, answer.out) == (9, "")


def test_an_unknown_kind_of_store_is_a_storage_error(ickpt: Ickpt) -> None:
    answer = ickpt("ls", "gopher://bucket/runs/17")
    assert answer.code == 9
    assert "gopher" in answer.err


def test_reading_verbs_write_nothing(ickpt: Ickpt, place: Path) -> None:
    before = sorted(place.rglob("*"))
    for verb in VERBS:
        assert ickpt(verb, place).code == 0
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFoundError("lost"), 3),
        (ConflictError("lost"), 4),
        (CorruptionError("lost", key="k"), 5),
        (FormatError("lost"), 6),
        (MismatchError("lost"), 7),
        (SaveError("lost"), 8),
        (StorageError("lost"), 9),
        (type("SpecialError", (FormatError,), {})("lost"), 6),
        (CheckpointError("lost"), 1),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("lost"), 1),
        (MemoryError("lost"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_each_error_has_its_exit_code_and_one_line(
    ickpt: Ickpt, place: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fails(store: Store) -> catalogue.Catalogue:
        raise error

    monkeypatch.setattr(catalogue, "read_catalogue", fails)
    answer = ickpt("ls", place)
    assert (answer.code, answer.out) == (code, "")
    assert ("interrupted" if code == 130 else "lost") in answer.err


def test_the_documentation_lists_every_exit_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    for code in (0, UNEXPECTED, USAGE, *CODES.values(), INTERRUPTED, PIPE_CLOSED):
        assert f"| {code} |" in page
    for error, code in CODES.items():
        assert re.search(rf"^\| {code} \| `{error.__name__}`", page, re.MULTILINE)


def test_the_documentation_lists_every_json_member(ickpt: Ickpt, place: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    documented = {
        verb: set(
            re.findall(r"^\| `([a-z_]+)` \|", page.split(f"### JSON of `{verb}`")[1].split("\n#")[0], re.MULTILINE)
        )
        for verb in VERBS
    }
    listed = ickpt("ls", place, "--json").json[0]
    assert listed.keys() == documented["ls"]
    assert ickpt("show", place, "--json").json.keys() == documented["ls"] | documented["show"]
    assert ickpt("check", place, "--json").json.keys() == documented["check"]


def test_every_subclass_of_checkpoint_error_has_a_code() -> None:
    classes = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, CheckpointError)}
    assert CODES.keys() == classes - {CheckpointError}


def test_a_fault_of_ickpt_shows_its_traceback_when_asked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICKPT_TRACEBACK", "1")
    monkeypatch.setattr(catalogue, "read_catalogue", lambda store: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["ls", str(place)])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ls"], "Missing argument 'URL'"),
        (["ls", "a", "b"], "unexpected extra argument"),
        (["ls", "--long", "a"], "--long"),
        (["show", "a", "--seq", "0"], "--seq"),
        (["show", "a", "--seq", "one"], "--seq"),
        (["erase", "a"], "erase"),
        (["--colour"], "--colour"),
    ],
)
def test_wrong_usage_is_2_and_names_what_is_wrong(ickpt: Ickpt, args: list[str], says: str) -> None:
    answer = ickpt(*args)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err
    assert "--help` explains" in answer.err


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["lss", "a"], "No such command 'lss'. Did you mean 'ls'? `ickpt --help` explains"),
        (["ls"], "Missing argument 'URL'. `ickpt ls --help` explains"),
        (
            ["show", "a", "--seq", "x"],
            "Invalid value for '--seq': 'x' is no whole number. `ickpt show --help` explains",
        ),
        (
            ["show", "a", "--seq", "2.5"],
            "Invalid value for '--seq': '2.5' is no whole number. `ickpt show --help` explains",
        ),
        (
            ["compact", "a", "--seq", "0"],
            "Invalid value for '--seq': 0 is too small: 1 at least. `ickpt compact --help` explains",
        ),
        (
            ["prune", "a", "--keep-last", "three"],
            "Invalid value for '--keep-last': 'three' is no whole number. `ickpt prune --help` explains",
        ),
        (["diff", "a", "4", "b"], "Invalid value for 'B': 'b' is no whole number. `ickpt diff --help` explains"),
        (
            ["export", "a", "b", "--format", "onnx"],
            "Invalid value for '--format': 'onnx' is not one of 'torch', 'safetensors', 'dcp'. "
            "`ickpt export --help` explains",
        ),
        (
            ["prune", "a"],
            "say what to keep: --keep-last K, --keep-every STEPS or --keep-best METRIC:K. "
            "`ickpt prune --help` explains",
        ),
    ],
)
def test_wrong_usage_reads_as_one_sentence_after_another(ickpt: Ickpt, args: list[str], line: str) -> None:
    assert ickpt(*args).err == f"ickpt: {line}\n"


def test_rows_that_stand_raw_beside_quantized_ones_are_counted_once(ickpt: Ickpt, tmp_path: Path) -> None:
    model = torch.nn.EmbeddingBag(100, 8, sparse=True)
    rows = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model, tmp_path / "run", optimizer=rows, codec="int8", kind="consecutive") as checkpointer:
        checkpointer.save_checkpoint(1).wait()
        model.weight.data[:7, 0] = float("nan")  # unseen; the rows are marked below
        checkpointer._tracker.mark(0, torch.arange(30))
        checkpointer.save_checkpoint(2).wait()
    shown = ickpt("show", tmp_path / "run", "--json").json
    (table,) = shown["tables"]
    assert table["fields"][0]["codecs"] == ["int8", "raw"]
    assert (shown["rows"], table["rows_carried"]) == (30, 30)


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    helped = capsys.readouterr().out
    assert app.commands.keys() >= set(VERBS)
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", helped, re.MULTILINE)
        assert main([verb, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_no_arguments_show_the_help_and_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: ickpt" in capsys.readouterr().out


def test_what_a_store_says_cannot_steer_the_terminal(ickpt: Ickpt, place: Path) -> None:
    evil = "x\x1b[2Jy\rz\n\u202e[bold]:smile:"
    rewrite(place, 4, metrics={evil: 0.25}, environment={evil: evil})
    shown, listed = ickpt("show", place).out, ickpt("ls", place).out
    for out in (shown, listed):
        assert not {"\x1b", "\r", "\u202e"} & set(out)
        assert r"x\x1b[2Jy\rz \u202e[bold]:smile:" in out
    assert ickpt("show", place, "--json").json["environment"] == {evil: evil}
