"""Whatever a repository says: a typed error or an honest answer, in bounded memory, and nothing outside its root."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from bounds import bounded_memory
from forgery import Objects, honest
from lies import LIES
from small_runs import Run

from incremental_ckpt import Checkpointer, CheckpointError, Repository
from incremental_ckpt.cli import main
from incremental_ckpt.compaction import compact
from incremental_ckpt.exporting import export
from incremental_ckpt.policy import KeepLast
from incremental_ckpt.pruning import prune
from incremental_ckpt.storage import MemoryStore, Store

TABLE = "tables.bag"


@pytest.fixture(scope="module")
def past() -> Objects:
    return honest()


@pytest.fixture(scope="module")
def victim() -> Run:
    return Run("adagrad", 21)


def stored(objects: Mapping[str, bytes]) -> Store:
    store = MemoryStore()
    for key, value in objects.items():
        store.put(key, [value])
    return store


def resume(store: Store, run: Run) -> None:
    with Checkpointer(run.model, store, **run.arguments) as checkpointer:
        checkpointer.resume_from_checkpoint()


def readers(run: Run, scratch: Path) -> Mapping[str, Callable[[Store], Any]]:
    return {
        "check": lambda store: Repository(store).check(deep=True),
        "checkpoints": lambda store: Repository(store).checkpoints(),
        "read_table": lambda store: Repository(store).read_table(TABLE),
        "resume": lambda store: resume(store, run),
        "compact": lambda store: compact(Repository(store)),
        "export": lambda store: export(Repository(store), scratch / "model.pt"),
        "prune": lambda store: prune(Repository(store), KeepLast(1), dry_run=False),
    }


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_a_typed_error_or_harmless_in_bounded_memory(
    lie: str, past: Objects, victim: Run, tmp_path: Path
) -> None:
    objects = LIES[lie](past)
    assert objects != past
    for name, read in readers(victim, tmp_path).items():
        store = stored(objects)
        try:
            with bounded_memory(), suppress(CheckpointError):
                read(store)
        except BaseException as error:
            error.add_note(f"{name} of a repository where {lie}")
            raise
    assert {path.name for path in tmp_path.iterdir()} <= {"model.pt"}
    assert not Path("pwned").exists()


def spread(objects: Mapping[str, bytes], root: Path) -> None:
    for key, value in objects.items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(value)


CALLED = ("tables of 2^40 rows", "a deep manifest", "a pack's key is '/etc/passwd' (str)", "packs of other tensors")


@pytest.mark.parametrize("lie", CALLED)
def test_the_command_line_answers_a_lie_with_one_line_and_no_traceback(
    lie: str, past: Objects, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spread(LIES[lie](past), tmp_path / "run")
    url, codes = str(tmp_path / "run"), set()
    for words in (["check", "--deep", url], ["show", url], ["ls", url], ["compact", url], ["diff", url, "1", "3"]):
        with bounded_memory(), pytest.raises(SystemExit) as ended:
            raise SystemExit(main(words))
        codes.add(ended.value.code)
        told = capfd.readouterr()
        assert "Traceback" not in told.out + told.err
    assert codes > {0} or codes.isdisjoint({0})
