"""Every verb on every sort of store: text and JSON stay apart from errors, and each answers with its code."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from incremental_ckpt.cli import CODES, USAGE
from incremental_ckpt.errors import CorruptionError, FormatError, NotFoundError, StorageError

Ickpt = Callable[..., Any]
COMMANDS: dict[str, tuple[str, ...]] = {
    "ls": ("{store}",),
    "show": ("{store}",),
    "check": ("{store}",),
    "compact": ("{store}",),
    "prune": ("{store}", "--keep-last", "1"),
    "export": ("{store}", "{out}"),
    "diff": ("{store}", "1", "2"),
}
LISTING = ("ls", "check", "prune")
STORES: dict[str, dict[str, int]] = {
    "good": dict.fromkeys(COMMANDS, 0),
    "empty": {verb: 0 if verb in LISTING else CODES[NotFoundError] for verb in COMMANDS},
    "damaged": dict.fromkeys(COMMANDS, CODES[CorruptionError]),
    "foreign": dict.fromkeys(COMMANDS, CODES[FormatError]),
    "file": dict.fromkeys(COMMANDS, CODES[StorageError]),
    "nowhere": dict.fromkeys(COMMANDS, CODES[NotFoundError]),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, written: Path, tmp_path: Path) -> Path:
    place = tmp_path / request.param
    if request.param in ("good", "damaged"):
        shutil.copytree(written, place)
    if request.param == "damaged":
        manifest = place / "manifests" / "00000002.json"
        raw = manifest.read_bytes().replace(b'"step":20', b'"step":21')
        manifest.unlink()
        manifest.write_bytes(raw)
    if request.param in ("empty", "foreign"):
        place.mkdir()
    if request.param == "foreign":
        (place / "photo.jpg").write_bytes(b"x")
    if request.param == "file":
        place.write_bytes(b"x")
    return place


@pytest.mark.parametrize("verb", COMMANDS)
def test_json_is_all_of_stdout_and_errors_are_on_stderr(ickpt: Ickpt, store: Path, tmp_path: Path, verb: str) -> None:
    args = [arg.format(store=store, out=tmp_path / "out") for arg in COMMANDS[verb]]
    answer = ickpt(verb, *args, "--json")
    assert answer.code == STORES[store.name][verb]
    # `ls`, `show` and `check` of a damaged store have something to say beside the error.
    if answer.code == 0 or (store.name == "damaged" and verb in ("ls", "show", "check")):
        assert isinstance(answer.json, (dict, list))
    else:
        assert answer.out == ""


@pytest.mark.parametrize("verb", COMMANDS)
def test_text_has_the_code_of_json(ickpt: Ickpt, store: Path, tmp_path: Path, verb: str) -> None:
    args = [arg.format(store=store, out=tmp_path / "out") for arg in COMMANDS[verb]]
    answer = ickpt(verb, *args)
    assert answer.code == STORES[store.name][verb]
    assert not answer.out.startswith(("[", "{"))


@pytest.mark.parametrize("verb", [*COMMANDS, "import"])
def test_wrong_usage_touches_nothing_and_names_the_help(ickpt: Ickpt, place: Path, tmp_path: Path, verb: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    for args in ([], [place, "--no-such-option"], [place, "--keep-last", "none", "1", "2", "3"]):
        answer = ickpt(verb, *args)
        assert (answer.code, answer.out) == (USAGE, "")
        assert f"`ickpt {verb} --help` explains" in answer.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gopher://bucket/runs", "no store for the scheme 'gopher'"),
        ("s3:/bucket/runs", "write s3://"),
        ("", "an empty string names no store"),
        ("s3://bucket/runs", "S3 needs boto3: pip install 'incremental-ckpt[s3]'"),
    ],
)
def test_a_url_that_cannot_be_opened_says_what_to_do(
    ickpt: Ickpt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, says: str
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    for name in [name for name in sys.modules if name.startswith("incremental_ckpt.storage.s3")]:
        monkeypatch.delitem(sys.modules, name)
    for verb, args in {**COMMANDS, "import": ("{out}", "{store}")}.items():
        answer = ickpt(verb, *(arg.format(store=url, out=tmp_path / "out") for arg in args), "--json")
        assert (answer.code, answer.out) == (CODES[StorageError], "")
        assert says in answer.err


OUT = {
    "file": (USAGE, "is a file"),
    "folder": (USAGE, "is a folder"),
    "link": (USAGE, "is a symbolic link"),
    "link to nothing": (USAGE, "is a symbolic link"),
    "file/below": (CODES[StorageError], "file is a file, not a folder"),
    "file/below/deeper": (CODES[StorageError], "file is a file, not a folder"),
    "x" * 300: (CODES[StorageError], "File name too long"),
}


@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
@pytest.mark.parametrize("name", OUT)
def test_an_export_to_a_name_that_is_taken_touches_nothing(
    ickpt: Ickpt, place: Path, tmp_path: Path, name: str, form: str
) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "link to nothing").symlink_to("nothing")
    before = sorted(tmp_path.rglob("*"))
    # The store is not there: what is wrong with OUT is said before anything is opened.
    answer = ickpt("export", tmp_path / "nowhere", tmp_path / name, "--format", form)
    code, says = OUT[name]
    assert (answer.code, answer.out) == (code, "")
    assert says in answer.err
    assert "nothing was touched" in answer.err.lower()
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_an_export_to_a_folder_that_may_not_be_written_says_so(
    ickpt: Ickpt, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr("incremental_ckpt.cli.upkeep.os.access", lambda path, mode: path != tmp_path / "theirs")
    answer = ickpt("export", place, tmp_path / "theirs" / "model.pt")
    assert answer.code == CODES[StorageError]
    assert f"{tmp_path / 'theirs'} is not writable by this user. Nothing was touched" in answer.err


def test_an_export_that_the_disk_has_no_room_for_leaves_nothing(
    ickpt: Ickpt, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files may not grow beyond 4 kB, which the kernel itself refuses; the model has 9."""
    folder = tmp_path / "exports"
    folder.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for form in ("torch", "safetensors", "dcp"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            answer = ickpt("export", place, folder / "model", "--format", form)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert answer.code == CODES[StorageError]
        assert f"cannot write {folder / 'model'}: " in answer.err
        assert "Nothing is left of it" in answer.err
        assert list(folder.iterdir()) == []


def test_an_import_of_what_is_no_model_is_a_format_error(ickpt: Ickpt, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for broken in ("{", "[]", '{"weight_map": 1}'):
        (model / "model.safetensors.index.json").write_text(broken)
        answer = ickpt("import", model, tmp_path / "run")
        assert answer.code == CODES[FormatError]
        assert "model.safetensors.index.json is no index of safetensors files" in answer.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_an_import_of_what_may_not_be_read_is_a_storage_error(
    ickpt: Ickpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_bytes(b"x" * 100)

    def refuse(*args: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / name))

    monkeypatch.setattr("incremental_ckpt.foreign.torch.load", refuse)
    monkeypatch.setattr("incremental_ckpt.foreign.map_file", refuse)
    answer = ickpt("import", tmp_path / name, tmp_path / "run")
    assert answer.code == CODES[StorageError]
    assert f"cannot read {tmp_path / name}: Permission denied" in answer.err


def test_an_import_cannot_be_told_of_tables_and_of_none(ickpt: Ickpt, tmp_path: Path) -> None:
    answer = ickpt("import", tmp_path / "model.pt", tmp_path / "run", "--table", "users", "--no-tables")
    assert answer.code == USAGE
    assert "--table and --no-tables exclude each other" in answer.err


def test_a_prune_says_where_a_metric_is_unknown(ickpt: Ickpt, place: Path) -> None:
    lines = ickpt("prune", place, "--keep-best", "aucc:1", "--dry-run").lines
    assert lines[0] == "keeps    1-4"
    told = "note     no checkpoint has the metric aucc, so all are kept until one has it (metrics: auc, lift)"
    assert lines[-1] == told
    assert not any("note" in line for line in ickpt("prune", place, "--keep-best", "auc:1", "--dry-run").lines)
    assert json.loads(ickpt("prune", place, "--keep-best", "aucc:1", "--dry-run", "--json").out)["forgotten"] == []
