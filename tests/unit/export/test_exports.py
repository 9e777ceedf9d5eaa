"""What is exported is read by those who it is for, and what they saved can begin a store."""

from __future__ import annotations

import json
import os
import pickle
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from chains import Chain, column_parts, shard, values
from dcp_rank import load_and_compare
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, Repository, Settings
from incremental_ckpt.compaction import compact
from incremental_ckpt.errors import (
    ConflictError,
    CorruptionError,
    FormatError,
    MismatchError,
    NotFoundError,
    StorageError,
)
from incremental_ckpt.exporting import content, export, safetensors_files
from incremental_ckpt.importing import import_checkpoint
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore, damage, on

FORMATS = ["torch", "safetensors", "dcp"]
SETTINGS = Settings(low_priority=False)
ALONE = "ignore:.*assuming the intent is to load in a single process.*:UserWarning"


@pytest.fixture(scope="module")
def finished() -> tuple[MemoryStore, Run]:
    """A base and two deltas, and the run as it was then."""
    store, run = MemoryStore(), Run("adagrad")
    with Checkpointer(run.model, store, **run.arguments, settings=SETTINGS, kind="consecutive") as ckpt:
        for step in (1, 2, 3):
            run.train()
            ckpt.save_checkpoint(step).wait()
    return store, run


@pytest.fixture
def few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "CHUNK_BYTES", 200)


def same_state(found: Any, run: Run) -> None:
    model = Run("adagrad", seed=9).model
    model.load_state_dict(found)
    assert_same(dict(model.state_dict()), dict(run.model.state_dict()))


@pytest.mark.usefixtures("few_rows_at_once")
def test_a_torch_file_loads_into_the_module_without_pickle(finished: tuple[MemoryStore, Run], tmp_path: Path) -> None:
    store, run = finished
    report = export(Repository(store), tmp_path / "model.pt")
    assert (report.seq, report.step, report.tables) == (3, 3, 2)
    assert report.bytes == (tmp_path / "model.pt").stat().st_size
    same_state(torch.load(tmp_path / "model.pt", weights_only=True), run)


@pytest.mark.usefixtures("few_rows_at_once")
def test_safetensors_load_into_the_module(finished: tuple[MemoryStore, Run], tmp_path: Path) -> None:
    store, run = finished
    export(Repository(store), tmp_path / "out", "safetensors")
    same_state(load_file(tmp_path / "out" / "model.safetensors"), run)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_large_model_is_several_files_with_an_index(
    finished: tuple[MemoryStore, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run = finished
    limited = safetensors_files.write
    monkeypatch.setattr(safetensors_files, "write", lambda c, out: limited(c, out, max_file_bytes=1000))
    export(Repository(store), tmp_path / "out", "safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = set(index["weight_map"].values())
    assert len(names) > 1
    assert names == {f.name for f in (tmp_path / "out").glob("*.safetensors")}
    found = {}
    for name in names:
        found |= load_file(tmp_path / "out" / name)
    assert dict(index["weight_map"].items()).keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    same_state(found, run)


@pytest.mark.filterwarnings(ALONE)
@pytest.mark.usefixtures("few_rows_at_once")
def test_a_dcp_directory_loads_into_the_module(finished: tuple[MemoryStore, Run], tmp_path: Path) -> None:
    store, run = finished
    export(Repository(store), tmp_path / "out", "dcp")
    found = Run("adagrad", seed=9).model.state_dict()
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    same_state(found, run)


@pytest.mark.usefixtures("few_rows_at_once")
def test_a_dcp_directory_loads_into_tables_that_two_ranks_share(
    forks: ForkServerContext, finished: tuple[MemoryStore, Run], tmp_path: Path
) -> None:
    store, run = finished
    export(Repository(store), tmp_path / "out", "dcp")
    torch.save(dict(run.model.state_dict()), tmp_path / "expected.pt")
    ranks = [forks.Process(target=load_and_compare, args=(rank, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", ["adagrad", "sparse_adam", "sgd"])
def test_a_run_goes_on_from_its_own_export(format: Any, layout: str, tmp_path: Path) -> None:
    store, run = MemoryStore(), Run(layout)
    with Checkpointer(run.model, store, optimizer=run.optimizers, settings=SETTINGS) as ckpt:
        run.train(3)
        ckpt.save_checkpoint(3).wait()
    export(Repository(store), tmp_path / "out", format, optimizer=True)
    begun = Repository(MemoryStore())
    report = import_checkpoint(tmp_path / "out", begun, step=3)
    assert (report.tables, report.optimizer) == (("tables.bag", "tables.small"), True)
    assert begun.check(deep=True).problems == ()
    assert values(begun, 1) == values(Repository(store), 1)
    heir = Run(layout, seed=9)
    with Checkpointer(heir.model, begun.store, optimizer=heir.optimizers, settings=SETTINGS) as ckpt:
        progress = ckpt.resume_from_checkpoint()
        assert progress is not None
        assert progress.step == 3
        for a, b in zip((heir.model, *heir.optimizers.values()), (run.model, *run.optimizers.values()), strict=True):
            assert_same(dict(a.state_dict()), dict(b.state_dict()))
        heir.train()
        assert ckpt.save_checkpoint(4, kind="consecutive").wait().parent == 1


def foreign(format: str, run: Run, place: Path) -> Path:
    """What another program saved of a model."""
    state = dict(run.model.state_dict())
    if format == "torch":
        torch.save(state, place)
    elif format == "safetensors":
        place = place.with_suffix(".safetensors")
        save_file(state, place)
    else:
        dcp.save({"model": state, "step": 7}, checkpoint_id=place, no_dist=True)
    return place


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to save in a single process.*:UserWarning")
@pytest.mark.parametrize("format", FORMATS)
def test_a_plain_state_dict_begins_a_store(format: str, tmp_path: Path) -> None:
    run = Run("adagrad")
    run.train(2)
    place = foreign(format, run, tmp_path / "saved")
    repository = Repository(MemoryStore())
    report = import_checkpoint(place, repository, tables=["tables.*"], step=2)
    assert (report.tables, report.optimizer) == (("tables.bag", "tables.small"), False)
    heir = Run("adagrad", seed=9)
    with Checkpointer(heir.model, repository.store, **heir.arguments, settings=SETTINGS, strict=False) as ckpt:
        assert ckpt.resume_from_checkpoint() is not None
        assert_same(dict(heir.model.state_dict()), dict(run.model.state_dict()))
        heir.train()
        assert ckpt.save_checkpoint(3, kind="consecutive").wait().kind == "base"


def test_tables_are_known_by_torchrecs_names(tmp_path: Path) -> None:
    names = ["sparse.embedding_bags.t_cat_0", "seq.embeddings.items", "over.0", "embeddings.dropout.norm"]
    torch.save({f"{name}.weight": torch.zeros(3, 4) for name in names}, tmp_path / "m.pt")
    report = import_checkpoint(tmp_path / "m.pt", Repository(MemoryStore()))
    assert report.tables == ("sparse.embedding_bags.t_cat_0", "seq.embeddings.items")
    assert report.tensors == 2


@pytest.mark.parametrize("format", FORMATS)
def test_dtypes_and_codecs_come_out_as_the_table_has_them(format: Any, tmp_path: Path) -> None:
    chain = Chain()
    tables = [shard("half", 50, 6, dtype="bfloat16"), shard("rounded", 70, 8), shard("empty", 0, 3)]
    chain.save([[(t, range(t.rows)) for t in tables]], codec="int8", state=True)
    chain.save([[(t, np.arange(0, t.rows, 3)) for t in tables]], codec="int4", unheld=False, state=True)
    expected = values(chain.repository, 2)
    export(chain.repository, tmp_path / "out", format, optimizer=True)
    repository = Repository(MemoryStore())
    report = import_checkpoint(tmp_path / "out", repository)
    assert report.tables == ("empty", "half", "rounded")
    assert values(repository, 1) == expected
    dtypes = {
        s.shard.table: s.shard.fields[0].dtype for s in repository.rank_manifests(repository.manifest(1))[0].shards
    }
    assert dtypes == {"half": "bfloat16", "rounded": "float32", "empty": "float32"}


@pytest.mark.parametrize("compacted", [False, True])
def test_what_many_ranks_hold_comes_out_in_one_piece(compacted: bool, tmp_path: Path) -> None:
    chain = Chain()
    parts = column_parts("users", 40, [0, 4, 12])
    chain.save([[(parts[0], range(40))], [(parts[1], range(40))]], state=True)
    chain.save([[(parts[0], np.arange(5))], [(parts[1], np.arange(7))]], state=True)
    if compacted:
        compact(chain.repository)
    export(chain.repository, tmp_path / "m.pt")
    whole = torch.load(tmp_path / "m.pt", weights_only=True)
    assert {n: t.tolist() for n, t in whole.items() if n != "users.weight"} == {
        "own.0": [0, 0], "own.1": [1, 1], "mean": 0
    }  # fmt: skip
    found = whole["users.weight"]
    assert found.shape == (40, 12)
    assert found.numpy().tobytes() == values(chain.repository, 2)["users", "weight"]


def test_nothing_is_overwritten_and_nothing_is_left_of_what_failed(
    finished: tuple[MemoryStore, Run], tmp_path: Path
) -> None:
    store, _ = finished
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageError, match="exists"):
        export(Repository(store), tmp_path / "taken", "dcp")
    damaged = Repository(FaultStore(store, damage(on("get", "data/00000001-*.safetensors"), at=-1)))
    for format in FORMATS:
        with pytest.raises(CorruptionError, match="data/00000001-"):
            export(damaged, tmp_path / "out", format)  # type: ignore[arg-type]
        assert [f.name for f in tmp_path.iterdir()] == ["taken"]
    with pytest.raises(NotFoundError, match="no checkpoint 8"):
        export(Repository(store), tmp_path / "out", seq=8)
    with pytest.raises(ValueError, match="format must be"):
        export(Repository(store), tmp_path / "out", "onnx")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
def test_what_appears_during_an_export_is_not_overwritten(
    format: Any, finished: tuple[MemoryStore, Run], tmp_path: Path
) -> None:
    out, seen = tmp_path / "out", list[int]()

    def appear(done: int, _: int) -> None:
        if not out.exists():
            out.write_bytes(b"mine") if format == "torch" else out.mkdir()
            seen.append(out.stat().st_ino)

    with pytest.raises(StorageError, match="exists, and nothing is ever overwritten"):
        export(Repository(finished[0]), out, format, progress=appear)
    assert [out.stat().st_ino] == seen
    assert out.read_bytes() == b"mine" if format == "torch" else list(out.iterdir()) == []
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("format", FORMATS)
def test_of_two_exports_to_one_place_at_once_one_is_told_that_it_exists(
    format: Any, finished: tuple[MemoryStore, Run], tmp_path: Path
) -> None:
    out, inner = tmp_path / "out", list[int]()

    def meet(done: int, _: int) -> None:
        if not inner:
            inner.append(0)
            inner[0] = export(Repository(finished[0]), out, format).bytes

    with pytest.raises(StorageError, match="exists, and nothing is ever overwritten"):
        export(Repository(finished[0]), out, format, progress=meet)
    assert inner[0] == sum(f.stat().st_size for f in (out, *out.rglob("*")) if f.is_file()) > 0
    assert list(tmp_path.iterdir()) == [out]


NAMES = ["x" * 255, "\N{GREEK SMALL LETTER OMEGA}" * 127, "\udcff.pt", ".hidden", "a\nb", "-dash", "a.lock", "end. "]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", NAMES, ids=[ascii(name)[:10] for name in NAMES])
def test_any_name_that_the_file_system_takes_will_do(
    format: Any, name: str, finished: tuple[MemoryStore, Run], tmp_path: Path
) -> None:
    export(Repository(finished[0]), tmp_path / name, format)
    assert [f.name for f in tmp_path.iterdir()] == [name]


def test_a_folder_of_another_encoding_is_named_where_torch_writes(
    finished: tuple[MemoryStore, Run], tmp_path: Path
) -> None:
    folder = tmp_path / "\udcff"
    with pytest.raises(StorageError, match="a folder's name is not UTF-8"):
        export(Repository(finished[0]), folder / "out", "torch")
    assert list(folder.iterdir()) == []
    export(Repository(finished[0]), folder / "out", "safetensors")


class Bomb:
    def __reduce__(self) -> Any:
        return (os.system, ("false",))


def test_what_would_need_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.zeros(2, 2), "bomb": Bomb()}, tmp_path / "m.pt")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Bomb()))
    for name in ("m.pt", "plain.pkl"):
        with pytest.raises(FormatError):
            import_checkpoint(tmp_path / name, Repository(MemoryStore()))


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to save in a single process.*:UserWarning")
def test_a_pickled_object_in_a_dcp_directory_is_refused(tmp_path: Path) -> None:
    dcp.save({"model": {"a.weight": torch.zeros(2, 2), "bomb": Bomb()}}, checkpoint_id=tmp_path / "d", no_dist=True)
    with pytest.raises(FormatError, match="pickle"):
        import_checkpoint(tmp_path / "d", Repository(MemoryStore()))


def test_what_is_no_saved_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (tmp_path / "folder").mkdir()
    store = Repository(MemoryStore())
    with pytest.raises(NotFoundError, match="does not exist"):
        import_checkpoint(tmp_path / "nowhere", store)
    with pytest.raises(FormatError, match=r"notes\.txt cannot be read"):
        import_checkpoint(tmp_path / "notes.txt", store)
    with pytest.raises(CorruptionError, match=r"cut\.safetensors"):
        import_checkpoint(tmp_path / "cut.safetensors", store)
    with pytest.raises(FormatError, match="neither"):
        import_checkpoint(tmp_path / "folder", store)
    assert store.listing().seqs == ()


@pytest.mark.parametrize(
    "raw",
    [b"", b"hello\n", b"root:x:0:0:root\n", b"\x80\x02", b"\x80\x02}q\x00.", b"PK\x03\x04", bytes(range(256)) * 4],
)
def test_bytes_that_torch_did_not_write_are_no_fault_of_ours(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.pt").write_bytes(raw)
    with pytest.raises((FormatError, CorruptionError), match=r"model\.pt"):
        import_checkpoint(tmp_path / "model.pt", Repository(MemoryStore()))


def test_tables_that_are_none_are_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.zeros(2, 2), "norm.weight": torch.zeros(5)}, tmp_path / "m.pt")
    with pytest.raises(MismatchError, match="no table 'b'"):
        import_checkpoint(tmp_path / "m.pt", Repository(MemoryStore()), tables=["b"])
    with pytest.raises(MismatchError, match=r"norm.weight.*shape \[5\]"):
        import_checkpoint(tmp_path / "m.pt", Repository(MemoryStore()), tables=["norm"])


def test_a_store_that_holds_checkpoints_is_left_alone(finished: tuple[MemoryStore, Run], tmp_path: Path) -> None:
    store, _ = finished
    torch.save({"a.weight": torch.zeros(2, 2)}, tmp_path / "m.pt")
    with pytest.raises(ConflictError, match="holds checkpoints already"):
        import_checkpoint(tmp_path / "m.pt", Repository(store))


class Tied(torch.nn.Module):
    """A table under two names, and a dense parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(20, 4, sparse=True)
        self.friends = self.users
        self.up = torch.nn.Linear(4, 4, bias=False)
        self.down = torch.nn.Linear(4, 4, bias=False)
        self.down.weight = self.up.weight


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_a_dense_parameter_keeps_both_its_names_and_a_table_the_first(format: Any, tmp_path: Path) -> None:
    model, store = Tied(), MemoryStore()
    rows = torch.optim.SGD(model.users.parameters(), lr=0.1)
    with Checkpointer(model, store, optimizer=rows, settings=SETTINGS) as ckpt:
        ckpt.save_checkpoint(1).wait()
    export(Repository(store), tmp_path / "out", format)
    place = tmp_path / "out"
    found = torch.load(place, weights_only=True) if format == "torch" else load_file(place / "model.safetensors")
    assert found.keys() == {"users.weight", "up.weight", "down.weight"}
    heir = Tied()
    assert heir.load_state_dict(found, strict=False).missing_keys == ["friends.weight"]
    assert_same(dict(heir.state_dict()), dict(model.state_dict()))
