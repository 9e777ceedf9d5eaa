"""What a resume promises: the state of the save or a clear refusal, and a run that goes on from there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Run, assert_same
from torch import nn

from incremental_ckpt import (
    Checkpointer,
    CorruptionError,
    EverySteps,
    FormatError,
    KeepLast,
    MismatchError,
    NotFoundError,
    Progress,
    Repository,
    ResumeEvent,
    Settings,
    StorageError,
)
from incremental_ckpt.compaction import compact
from incremental_ckpt.format.sealed import FORMAT, seal, unseal
from incremental_ckpt.pruning import prune
from incremental_ckpt.storage import LocalStore, MemoryStore
from incremental_ckpt.surroundings import capture_rng
from incremental_ckpt.testing import FaultStore, damage, on


class Random:
    """A state object."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def flip(store: MemoryStore, key: str) -> None:
    raw = bytearray(store.get(key))
    raw[-1] ^= 1
    store.delete([key])
    store.put(key, [raw])


@pytest.fixture
def run() -> Run:
    return Run()


def checkpointer(run: Run, store_name: str, **arguments: Any) -> Checkpointer:
    return Checkpointer(run.model, MemoryStore(store_name), **run.arguments, **{"kind": "consecutive", **arguments})


def saved(run: Run, store_name: str, steps: list[int]) -> dict[int, Any]:
    """A job that saves at some steps, and the states by place in the list."""
    states = {}
    with checkpointer(run, store_name) as c:
        for place, step in enumerate(steps):
            run.train()
            c.save_checkpoint(step, epoch=place, loss=place / 2, metrics={"place": place}).wait()
            states[place] = run.copy()
    return states


def resumed(store_name: str, step: int | None = None, **arguments: Any) -> tuple[Run, Progress]:
    again = Run(seed=8)
    with checkpointer(again, store_name, **arguments) as c:
        progress = c.resume_from_checkpoint(step)
        assert progress is not None
    return again, progress


def test_an_empty_store_is_no_checkpoint_and_one_line_in_the_log(
    run: Run, store_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), checkpointer(run, store_name) as c:
        assert c.resume_from_checkpoint() is None
        assert len(caplog.records) == 1
        with pytest.raises(NotFoundError, match="step 5"):
            c.resume_from_checkpoint(step=5)
        c.save_checkpoint(0).wait()
    assert resumed(store_name)[1] == Progress(1, 0, None, None, {})


def test_progress_is_what_the_save_was_told(run: Run, store_name: str) -> None:
    states = saved(run, store_name, [10, 20])
    again, progress = resumed(store_name)
    assert progress == Progress(2, 20, 1, 0.5, {"place": 1.0})
    assert_same(again.copy(), states[1])


def test_step_0_and_equal_steps_work_and_the_highest_seq_wins(run: Run, store_name: str) -> None:
    states = saved(run, store_name, [0, 7, 7, 3, 7, 3])
    for step, place in ((0, 0), (7, 4), (3, 5)):
        again, progress = resumed(store_name, step)
        assert progress.seq == place + 1
        assert_same(again.copy(), states[place])
    with pytest.raises(NotFoundError, match=r"step 4.*0, 3, 7"):
        resumed(store_name, 4)


def test_steps_that_go_back_are_saved_and_warned_of_unless_a_resume_went_back(
    run: Run, store_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with checkpointer(run, store_name) as c:
        for step in (5, 10, 10):
            c.save_checkpoint(step).wait()
        c.resume_from_checkpoint(step=5)
        c.save_checkpoint(7).wait()
        assert "no resume between them" not in caplog.text
        run.train()
        c.save_checkpoint(5).wait()
        assert "step 5 is saved after step 7, with no resume between them" in caplog.text
    assert_same(resumed(store_name, 5)[0].copy(), run.copy())


def test_a_resumed_run_repeats_the_one_that_was_not_interrupted(run: Run, store_name: str) -> None:
    saved(run, store_name, [1, 2])
    run.train(4)  # one after the other: they share the global random generators
    expected = run.copy()
    again, _ = resumed(store_name)
    again.train(4)
    assert_same(again.copy(), expected)


@pytest.mark.parametrize("fresh_process", [False, True])
def test_a_run_that_goes_back_starts_its_branch_with_a_base(run: Run, store_name: str, fresh_process: bool) -> None:
    c = checkpointer(run, store_name)
    states = []
    for step in range(1, 4):
        run.train()
        c.save_checkpoint(step).wait()
        states.append(run.copy())
    if fresh_process:
        c.close()
        run = Run(seed=5)
        c = checkpointer(run, store_name)
    assert c.resume_from_checkpoint(step=2) is not None
    assert_same(run.copy(), states[1])
    for kind in ("base", "delta", "delta"):
        run.train()
        assert c.save_checkpoint(3).wait().kind == kind
    c.close()
    again, progress = resumed(store_name)
    assert progress.seq == 6
    assert_same(again.copy(), run.copy())
    assert [i.seq for i in Repository(MemoryStore(store_name)).chain(6)] == [4, 5, 6]


def test_a_run_that_resumes_the_newest_goes_on_with_deltas(run: Run, store_name: str) -> None:
    saved(run, store_name, [1, 2])
    again = Run(seed=5)
    with checkpointer(again, store_name) as c:
        for step in (3, 4):  # twice in one process
            c.resume_from_checkpoint()
            again.train()
            assert c.save_checkpoint(step).wait().kind == "delta"
    assert_same(resumed(store_name)[0].copy(), again.copy())


def test_a_job_that_does_not_resume_starts_with_a_base_behind_what_is_there(
    run: Run, store_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    states = saved(run, store_name, [1, 2])
    other = Run(seed=5)
    with checkpointer(other, store_name) as c:
        info = c.save_checkpoint(9).wait()
    assert (info.seq, info.kind) == (3, "base")
    assert "did not resume" in caplog.text
    assert_same(resumed(store_name)[0].copy(), other.copy())
    assert_same(resumed(store_name, 2)[0].copy(), states[1])


def test_a_damaged_first_checkpoint_of_a_job_that_did_not_resume_has_no_ancestor(run: Run, store_name: str) -> None:
    saved(run, store_name, [1, 2])
    with checkpointer(Run(seed=5), store_name) as c:
        c.save_checkpoint(9).wait()
    store = FaultStore(MemoryStore(store_name), damage(on("get", "manifests/00000003.json"), at=-1))
    again = Run(seed=8)
    with Checkpointer(again.model, store, **again.arguments) as c, pytest.raises(CorruptionError):
        c.resume_from_checkpoint()


def test_rows_that_a_failed_resume_has_overwritten_are_in_the_next_checkpoint(run: Run, store_name: str) -> None:
    store = FaultStore(MemoryStore(store_name))
    settings = Settings(read_threads=1)
    with Checkpointer(run.model, store, **run.arguments, kind="consecutive", settings=settings) as c:
        run.train()
        c.save_checkpoint(1).wait()
        first = run.rows_of("tables.bag").clone()
        run.train(5)
        c.save_checkpoint(3).wait()
        # Of the two tables' two fields the last is damaged: by then the others are overwritten.
        store.inject(damage(on("get", "data/00000001-*-0000.safetensors", at=4), at=-1))
        with pytest.raises(CorruptionError):
            c.resume_from_checkpoint(step=1)
        assert torch.equal(run.rows_of("tables.bag"), first)
        store.heal()
        run.train()
        c.save_checkpoint(4).wait()
    assert_same(resumed(store_name)[0].copy(), run.copy())


def test_a_damaged_checkpoint_is_passed_over_and_the_event_says_so(run: Run, store_name: str) -> None:
    states = saved(run, store_name, [1, 2, 3])
    store = FaultStore(MemoryStore(store_name), damage(on("get", "data/00000003-*.safetensors"), at=-1))
    events: list[Any] = []
    again = Run(seed=3)
    with Checkpointer(again.model, store, **again.arguments, kind="consecutive", on_event=events.append) as c:
        progress = c.resume_from_checkpoint()
        assert progress is not None
        assert progress.step == 2
        (event,) = events
        assert isinstance(event, ResumeEvent)
        assert [seq for seq, _ in event.passed_over] == [3]
        assert_same(again.copy(), states[1])
        again.train()
        assert c.save_checkpoint(3).wait().kind == "base"
    assert_same(resumed(store_name)[0].copy(), again.copy())


@pytest.mark.parametrize("damaged", [".base.json", ".safetensors"])
def test_a_damaged_compaction_is_passed_over_for_the_chain_that_it_stands_for(
    damaged: str, run: Run, store_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    states = saved(run, store_name, [1, 2, 3])
    store = MemoryStore(store_name)
    before = {one.key for one in store.list()}
    compact(Repository(store), 2)
    (broken,) = [one.key for one in store.list() if one.key not in before and one.key.endswith(damaged)]
    flip(store, broken)
    for step, place in ((None, 2), (2, 1)):
        again, _ = resumed(store_name, step)
        assert_same(again.copy(), states[place])
    assert "damaged compaction" in caplog.text


def test_a_run_that_passed_over_a_damaged_compaction_depends_on_it_no_more(run: Run, store_name: str) -> None:
    saved(run, store_name, [1, 2, 3, 4, 5])
    store = MemoryStore(store_name)
    before = {one.key for one in store.list()}
    compact(Repository(store), 5)
    flip(store, next(o.key for o in store.list() if o.key not in before and o.key.endswith(".safetensors")))
    again = Run(seed=3)
    with checkpointer(again, store_name, keep=KeepLast(2)) as c:
        assert c.resume_from_checkpoint() is not None
        for step in (6, 7, 8):
            again.train()
            assert c.save_checkpoint(step).wait().kind == ("base" if step == 6 else "delta")
    assert_same(resumed(store_name)[0].copy(), again.copy())


def test_of_two_compactions_only_the_damaged_one_is_passed_over(run: Run, store_name: str) -> None:
    states = saved(run, store_name, [1, 2, 3, 4, 5])
    store = MemoryStore(store_name)
    compact(Repository(store), 3)
    prune(Repository(store), KeepLast(3), dry_run=False)
    compact(Repository(store), 5)
    flip(store, "manifests/00000005.base.json")
    again, progress = resumed(store_name)
    assert progress.seq == 5
    assert_same(again.copy(), states[4])


def from_the_future(store: MemoryStore, key: str) -> None:
    """The object as a later version of the format would have it: sealed and whole."""
    members = unseal(store.get(key), key)
    del members["digest"]
    store.delete([key])
    store.put(key, [seal({**members, "format": FORMAT + 1})])


@pytest.mark.parametrize("step", [None, 3])
def test_a_compaction_of_a_newer_version_is_passed_over_for_the_chain_and_named(
    step: int | None, run: Run, store_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    states = saved(run, store_name, [1, 2, 3])
    store = MemoryStore(store_name)
    compact(Repository(store), 3)
    from_the_future(store, "manifests/00000003.base.json")
    again = Run(seed=8)
    with checkpointer(again, store_name) as c:
        assert c.resume_from_checkpoint(step) is not None
        assert_same(again.copy(), states[2])
        assert c.save_checkpoint(4).wait().kind == "base"
    assert f"manifests/00000003.base.json is in format {FORMAT + 1}" in caplog.text
    assert "the chain that a compaction of a newer version (.base.json) stands for" in caplog.text


@pytest.mark.parametrize("lost", ["manifests/00000003.json", "data/00000002-"])
def test_where_only_a_newer_version_can_read_the_newest_checkpoint_no_older_one_is_taken(
    lost: str, run: Run, store_name: str
) -> None:
    saved(run, store_name, [1, 2, 3])
    store = MemoryStore(store_name)
    if lost.startswith("data"):  # as after a prune, which needs no more than the compaction
        compact(Repository(store), 3)
        from_the_future(store, "manifests/00000003.base.json")
        store.delete([one.key for one in store.list(lost)])
    else:
        from_the_future(store, lost)
    again = Run(seed=8)
    before = again.copy()
    with checkpointer(again, store_name) as c, pytest.raises(FormatError, match="upgrade incremental_ckpt"):
        c.resume_from_checkpoint()
    assert_same(again.copy()["model"], before["model"])


def test_what_a_run_that_did_not_resume_found_is_not_its_own_to_forget(run: Run, store_name: str) -> None:
    saved(run, store_name, [1, 2, 3])
    other = Run(seed=5)
    with checkpointer(other, store_name, keep=KeepLast(1)) as c:
        for step in (1, 2, 3):
            other.train()
            c.save_checkpoint(step, kind="full").wait()
    assert [info.seq for info in Repository(MemoryStore(store_name)).checkpoints()] == [1, 2, 3, 6]


def test_of_a_damaged_compaction_and_a_damaged_chain_an_ancestor_is_taken(run: Run, store_name: str) -> None:
    states = saved(run, store_name, [1, 2, 3])
    compact(Repository(MemoryStore(store_name)), 3)
    store = FaultStore(
        MemoryStore(store_name),
        damage(on("get", "manifests/00000003.base.json"), at=-1),
        damage(on("get", "data/00000003-*.safetensors"), at=-1),
    )
    events: list[Any] = []
    again = Run(seed=3)
    with Checkpointer(again.model, store, **again.arguments, on_event=events.append) as c:
        assert c.resume_from_checkpoint() is not None
    assert [seq for seq, _ in events[0].passed_over] == [3]
    assert_same(again.copy(), states[1])


def test_a_step_that_is_damaged_is_an_error_and_no_other_is_taken_instead(run: Run, store_name: str) -> None:
    saved(run, store_name, [1, 2])
    store = FaultStore(MemoryStore(store_name), damage(on("get", "data/00000002-*.safetensors"), at=-1))
    again = Run(seed=3)
    with Checkpointer(again.model, store, **again.arguments) as c, pytest.raises(CorruptionError, match="00000002"):
        c.resume_from_checkpoint(step=2)


class Wide(nn.Module):
    """The tables of a small run in other shapes, or others."""

    def __init__(self, rows: int = 61, dim: int = 8, dtype: torch.dtype = torch.float32, more: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(rows, dim, sparse=True, mode="sum", dtype=dtype)
        if more:
            self.more = nn.EmbeddingBag(4, 2, sparse=True, mode="sum")


def wide(model: nn.Module, store_name: str, **arguments: Any) -> Checkpointer:
    return Checkpointer(
        model, MemoryStore(store_name), optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1), **arguments
    )


def test_of_very_many_differences_the_first_are_named_and_the_others_counted(store_name: str) -> None:
    with Checkpointer(nn.Sequential(*(nn.Linear(1, 1) for _ in range(60))), MemoryStore(store_name)) as c:
        c.save_checkpoint(1).wait()
    with (
        Checkpointer(nn.Sequential(nn.Linear(1, 1)), MemoryStore(store_name)) as c,
        pytest.raises(MismatchError, match="and 18 more\nstrict=False") as caught,
    ):
        c.resume_from_checkpoint()
    assert str(caught.value).count("\n") == 102


def test_what_is_no_model_is_named_by_its_type_and_not_written_out(store_name: str) -> None:
    parts: Any = {f"layer {number}": torch.zeros(100) for number in range(100)}
    with pytest.raises(TypeError) as caught:
        Checkpointer(parts, MemoryStore(store_name))
    assert str(caught.value) == "model takes an nn.Module, not dict"
    model: Any = nn.Sequential(*(nn.Linear(1, 1) for _ in range(60)))
    with pytest.raises(TypeError) as caught:
        Checkpointer(model, MemoryStore(store_name), on_event=[model])  # type: ignore[arg-type]
    assert str(caught.value) == "on_event takes a function of one event, not list"


def test_random_states_of_other_devices_are_refused_before_anything_is_changed(
    run: Run, store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {**capture_rng(), "cuda": [torch.get_rng_state()] * 3}
    with monkeypatch.context() as patch, checkpointer(run, store_name) as c:
        patch.setattr("incremental_ckpt.checkpointer.capture_rng", lambda: states)
        c.save_checkpoint(1).wait()
    again = Run(seed=8)
    with checkpointer(again, store_name) as c:
        before = again.copy()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(MismatchError, match=r"nothing was changed:\n  .* of 3 CUDA devices, this process sees 2"):
            c.resume_from_checkpoint()
        monkeypatch.undo()
        assert_same(again.copy(), before)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Wide(rows=60), ["bag", "60 x 8", "61 x 8"]),
        (Wide(dim=4), ["bag", "61 x 4", "61 x 8"]),
        (Wide(dtype=torch.float64), ["bag", "float64", "float32"]),
        (Wide(more=True), ["more", "4 x 2", "not in the checkpoint"]),
    ],
)
def test_a_model_with_other_tables_is_refused_with_both_shapes_and_left_as_it_is(
    model: Wide, words: list[str], store_name: str
) -> None:
    with wide(Wide(), store_name) as c:
        c.save_checkpoint(1).wait()
    before = model.bag.weight.detach().clone()
    with wide(model, store_name) as c, pytest.raises(MismatchError) as caught:
        c.resume_from_checkpoint()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert torch.equal(model.bag.weight, before)


def test_a_table_that_the_model_lacks_is_refused_by_name(store_name: str) -> None:
    with wide(Wide(more=True), store_name) as c:
        c.save_checkpoint(1).wait()
    with wide(Wide(), store_name) as c, pytest.raises(MismatchError, match=r"more.*4 x 2.*not in the model"):
        c.resume_from_checkpoint()


@pytest.mark.parametrize(("saved_more", "loaded_more"), [(True, False), (False, True)])
def test_not_strict_loads_the_tables_that_both_have(saved_more: bool, loaded_more: bool, store_name: str) -> None:
    source, target = Wide(more=saved_more), Wide(more=loaded_more)
    with Checkpointer(source, MemoryStore(store_name)) as c:
        c.save_checkpoint(1).wait()
    with Checkpointer(target, MemoryStore(store_name), strict=False) as c:
        assert c.resume_from_checkpoint() is not None
        assert torch.equal(target.bag.weight, source.bag.weight)
        assert c.save_checkpoint(2).wait().kind == "base"
    again = Wide(more=loaded_more)
    with Checkpointer(again, MemoryStore(store_name)) as c:
        c.resume_from_checkpoint()
    for ours, theirs in zip(again.parameters(), target.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_state_objects_must_be_those_of_the_checkpoint_unless_not_strict(run: Run, store_name: str) -> None:
    saved(run, store_name, [1])
    again = Run(seed=3)
    fewer = {"reader": again.reader}
    with (
        Checkpointer(again.model, MemoryStore(store_name), optimizer=again.optimizers, state=fewer) as c,
        pytest.raises(MismatchError, match="scheduler"),
    ):
        c.resume_from_checkpoint()
    with Checkpointer(again.model, MemoryStore(store_name), optimizer=again.optimizers, state=fewer, strict=False) as c:
        assert c.resume_from_checkpoint() is not None
    assert again.reader.position == 1


def test_a_model_without_embeddings_is_saved_and_comes_back(store_name: str) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make(0)
    with Checkpointer(model, MemoryStore(store_name), optimizer=optimizer, kind="consecutive") as c:
        for step in range(3):
            model(torch.rand(4, 3)).sum().backward()
            optimizer.step()
            info = c.save_checkpoint(step).wait()
    assert (info.kind, info.rows, info.table_rows) == ("delta", 0, 0)
    again, its_optimizer = make(1)
    with Checkpointer(again, MemoryStore(store_name), optimizer=its_optimizer) as c:
        assert c.resume_from_checkpoint() is not None
    assert_same(again.state_dict(), model.state_dict())
    assert_same(its_optimizer.state_dict(), optimizer.state_dict())


def test_a_foreign_folder_is_refused_and_not_touched(run: Run, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FormatError, match=r"thesis\.txt"):
        Checkpointer(run.model, tmp_path, **run.arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_place_that_is_no_folder_is_a_storage_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        Checkpointer(run.model, tmp_path / "file", **run.arguments)


def test_a_read_only_store_is_refused_when_the_checkpointer_is_made(run: Run, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="was opened with read_only=True"):
        Checkpointer(run.model, LocalStore(tmp_path, read_only=True), **run.arguments)


def test_a_run_in_a_folder_comes_back_from_its_path(run: Run, tmp_path: Path) -> None:
    with Checkpointer(run.model, tmp_path / "runs" / "1", **run.arguments, settings=Settings(pack_bytes=600)) as c:
        run.train()
        c.save_checkpoint(1)
    again = Run(seed=2)
    with Checkpointer(again.model, str(tmp_path / "runs" / "1"), **again.arguments) as c:
        assert c.resume_from_checkpoint() is not None
    assert_same(again.copy(), run.copy())


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"kind": "sometimes"}, ValueError, "sometimes"), ({"busy": "later"}, ValueError, "later"),
        ({"codec": "int5"}, ValueError, "codec must be one of 'auto', .*'int8', 'raw', not 'int5'"),
        ({"codec": 8}, TypeError, "codec takes the name of a codec, one of 'auto', .*, not 8"),
        ({"codec": None}, TypeError, "'raw', not None"), ({"codec": ["raw"]}, TypeError, "codec takes the name"),
        ({"optimizer_codec": "auto"}, ValueError, "one of 'bf16', 'raw', not 'auto'; 'auto' is for weights only"),
        ({"optimizer_codec": "int5"}, ValueError, "optimizer_codec must be one of 'bf16', 'raw', not 'int5'$"),
        ({"optimizer_codec": 4}, TypeError, "optimizer_codec takes the name of a codec, one of 'bf16', 'raw', not 4"),
        ({"state": {"reader": 3}}, TypeError, "reader"),
        ({"optimizer": 3}, TypeError, "int"), ({"optimizer": "adam"}, TypeError, "str"),
        ({"when": "daily"}, TypeError, "when"), ({"when": EverySteps}, TypeError, "when"),
        ({"keep": 3}, TypeError, "keep"), ({"keep": [KeepLast]}, TypeError, "keep"),
        ({"state": [3]}, TypeError, "by name"), ({"state": {1: Random()}}, TypeError, "by name"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_right_are_refused_at_once(
    arguments: dict[str, Any], error: type[Exception], word: str, store_name: str
) -> None:
    with pytest.raises(error, match=word):
        Checkpointer(nn.Linear(1, 1), MemoryStore(store_name), **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"step": "7"}, TypeError, "step must be an int, not '7'"), ({"step": -1}, ValueError, "step"),
        ({"step": 1.5}, TypeError, "step"), ({"step": 1, "epoch": "a"}, TypeError, "epoch"),
        ({"step": 1, "loss": "low"}, TypeError, "loss"), ({"step": 1, "loss": torch.zeros(2)}, TypeError, "loss"),
        ({"step": 1, "metrics": {"auc": None}}, TypeError, "auc"), ({"step": 1, "kind": "half"}, ValueError, "half"),
    ],
)  # fmt: skip
def test_what_a_save_is_told_wrongly_is_refused_by_name_and_costs_nothing(
    arguments: dict[str, Any], error: type[Exception], word: str, run: Run, store_name: str
) -> None:
    with checkpointer(run, store_name) as c:
        with pytest.raises(error, match=word):
            c.save_checkpoint(**arguments)
        assert c.save_checkpoint(1).wait().step == 1
    assert_same(resumed(store_name)[0].copy(), run.copy())
