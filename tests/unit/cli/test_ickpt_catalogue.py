"""What ``ickpt ls`` reads and draws: each manifest verified in what is shown, equivalents, columns that fit."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from incremental_ckpt import Repository, open_store
from incremental_ckpt.cli import catalogue_table
from incremental_ckpt.cli.catalogue import read_catalogue
from incremental_ckpt.compaction import compact
from incremental_ckpt.errors import CorruptionError, StorageError
from incremental_ckpt.format import layout
from incremental_ckpt.format.sealed import seal, unseal
from incremental_ckpt.testing import FaultStore, Op, Perform, TracingStore, fail, on

Ickpt = Callable[..., Any]
BASE = "manifests/00000004.base.json"


@pytest.fixture
def compacted(place: Path) -> Path:
    compact(Repository(open_store(place)))
    return place


def rewrite(path: Path, **members: Any) -> None:
    """A manifest that is whole and says something else; a member of None is left out."""
    before = unseal(path.read_bytes(), str(path))
    del before["digest"]
    path.unlink()
    path.write_bytes(seal({name: value for name, value in (before | members).items() if value is not ...}))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[200] ^= 1
    path.unlink()
    path.write_bytes(raw)


def test_it_lists_what_a_repository_does(compacted: Path) -> None:
    store = open_store(compacted)
    found = read_catalogue(store)
    assert [one.info for one in found.checkpoints] == Repository(store).checkpoints()
    assert found.unreadable == ()


def test_each_manifest_is_read_once_and_nothing_else(compacted: Path) -> None:
    store = TracingStore(open_store(compacted))
    read_catalogue(store)
    read = sorted(traced.op.key for traced in store.trace if traced.op.kind == "get")
    assert read == sorted([*(layout.manifest_key(seq) for seq in (1, 2, 3, 4)), BASE, "repo.json"])


def test_a_store_behind_a_network_is_asked_for_several_manifests_at_a_time(place: Path) -> None:
    together = threading.Barrier(4, timeout=30)

    def wait_for_the_others(op: Op, perform: Perform) -> object:
        if op.kind == "get" and op.key.startswith("manifests/"):
            together.wait()
        return perform(op)

    found = read_catalogue(FaultStore(open_store(place), wait_for_the_others))
    assert [one.info.seq for one in found.checkpoints] == [1, 2, 3, 4]


def test_a_store_that_does_not_answer_is_no_unreadable_manifest(place: Path) -> None:
    with pytest.raises(StorageError, match="no answer"):
        read_catalogue(FaultStore(open_store(place), fail(on("get", "manifests/00000003*"))))


@pytest.mark.parametrize(
    "members",
    [{"seq": 3}, {"kind": "full"}, {"kind": "base"}, {"step": "30"}, {"created": "now"}, {"totals": {}}, {"job": ...}],
    ids=str,
)
def test_a_manifest_that_is_not_what_it_should_be_is_unreadable(place: Path, members: dict[str, Any]) -> None:
    rewrite(place / "manifests/00000002.json", **members)
    found = read_catalogue(open_store(place))
    assert [one.info.seq for one in found.checkpoints] == [1, 3, 4]
    (unreadable,) = found.unreadable
    assert (unreadable.seq, unreadable.equivalent) == (2, False)
    assert isinstance(unreadable.error, CorruptionError)
    assert unreadable.error.key == "manifests/00000002.json"


def test_an_equivalent_base_is_shown_beside_its_checkpoint(ickpt: Ickpt, compacted: Path) -> None:
    beside = sum(f.stat().st_size for f in compacted.glob("data/00000004-c*/rank-*"))
    listed = ickpt("ls", compacted, "--json").json
    assert [one["equivalent_bytes"] for one in listed] == [None, None, None, beside]
    assert [one["stored_bytes"] for one in listed] == [
        *(one["bytes"] for one in listed[:3]),
        listed[3]["bytes"] + beside,
    ]
    lines = ickpt("ls", compacted).lines
    end = lines[0].index("as base") + len("as base")
    assert [line[end - 7 : end].strip() for line in lines[1:5]] == ["-", "-", "-", f"{beside / 1000:.1f} kB"]
    assert lines[5].endswith(f", {beside / 1000:.1f} kB of it in 1 equivalent base")
    assert "of an equivalent base\n" in ickpt("show", compacted).out
    shown = ickpt("show", compacted, "--json").json
    assert {name: shown[name] for name in listed[3]} == listed[3]


def test_without_equivalents_there_is_no_column_for_them(ickpt: Ickpt, place: Path) -> None:
    assert "as base" not in ickpt("ls", place).out
    assert "equivalent" not in ickpt("ls", place).out


def test_an_equivalent_of_other_content_is_none(ickpt: Ickpt, compacted: Path) -> None:
    rewrite(compacted / BASE, of="0" * 64)
    answer = ickpt("ls", compacted, "--json")
    assert (answer.code, answer.json[3]["equivalent_bytes"]) == (0, None)


def test_an_equivalent_that_cannot_be_read_is_named_and_its_checkpoint_is_listed(ickpt: Ickpt, compacted: Path) -> None:
    flip(compacted / BASE)
    answer = ickpt("ls", compacted)
    assert answer.code == 5
    assert "the equivalent base of seq 4 cannot be read: manifests/00000004.base.json is damaged" in answer.err
    assert answer.lines[4].split()[:3] == ["4", "40", "delta"]
    assert "unreadable" in answer.lines[4]
    assert answer.lines[5].startswith("4 checkpoints, ")
    as_json = ickpt("ls", compacted, "--json")
    assert (as_json.code, [one["equivalent_bytes"] for one in as_json.json]) == (5, [None] * 4)


@pytest.mark.parametrize("width", range(30, 130, 7))
def test_a_terminal_is_given_whole_columns_that_fit(
    ickpt: Ickpt, compacted: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    columns = []
    monkeypatch.setattr(catalogue_table, "lines", lambda shown, paint: columns.extend(shown) or [])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(width))
    catalogue_table.show_catalogue("runs/17", read_catalogue(open_store(compacted)))
    names = [column.name for column in columns]
    assert {"seq", "step", "kind", "size", "created (UTC)"} <= set(names)
    used = sum(column.width + 2 for column in columns) - 2
    assert used <= width or len(names) == 5
    dropped = [
        name for name in ("epoch", "of all", "rows", "lift", "auc", "loss", "parent", "as base") if name not in names
    ]
    assert dropped == ["epoch", "of all", "rows", "lift", "auc", "loss", "parent", "as base"][: len(dropped)]


def test_what_is_piped_has_all_columns(ickpt: Ickpt, compacted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    header = ickpt("ls", compacted).lines[0]
    for name in ("parent", "rows", "of all", "as base", "epoch", "loss", "auc", "lift"):
        assert name in header


def test_a_store_without_checkpoints_has_an_empty_catalogue(tmp_path: Path, place: Path) -> None:
    assert read_catalogue(open_store(tmp_path / "new")).checkpoints == ()
    shutil.rmtree(place / "manifests")
    assert read_catalogue(open_store(place)).checkpoints == ()


def last_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.unlink()
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", [last_byte, Path.unlink])
@pytest.mark.parametrize("damaged", ["manifests/00000004.base.json", "data/00000004-c*/*.safetensors"])
def test_what_a_damaged_compaction_stands_for_is_whole_by_its_chain(
    ickpt: Ickpt, compacted: Path, damaged: str, damage: Callable[[Path], None]
) -> None:
    there = damaged.endswith(".json") and damage is Path.unlink  # then there is no compaction, and nothing is wrong
    damage(next(iter(sorted(compacted.glob(damaged)))))
    answer = ickpt("check", compacted, "--deep", "--json")
    assert answer.code == (0 if there else 5)
    assert (answer.json["restorable"], answer.json["damaged"], answer.json["resumes"]) == ([1, 2, 3, 4], [], 4)
    next(iter(sorted(compacted.glob("data/00000002-*/*.safetensors")))).unlink()
    answer = ickpt("check", compacted, "--deep", "--json")
    assert (answer.json["restorable"], answer.json["damaged"], answer.json["resumes"]) == ([1], [2, 3, 4], 1)


def test_what_a_compaction_stands_for_may_lose_its_rows_and_what_no_resume_reads_is_told_but_missed_by_nobody(
    ickpt: Ickpt, compacted: Path
) -> None:
    flip(next(iter(sorted(compacted.glob("data/00000004-c*/*.safetensors")))))  # within the header
    next(iter(sorted(compacted.glob("data/00000003-*/*.safetensors")))).unlink()
    answer = ickpt("check", compacted, "--deep", "--json")
    assert answer.code == 5
    assert (answer.json["restorable"], answer.json["damaged"], answer.json["resumes"]) == ([1, 2, 4], [3], 4)
    assert "a resume takes it" in ickpt("check", compacted, "--deep").out
