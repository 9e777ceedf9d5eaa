"""Whatever takes its time shows on a terminal how far it is, and nothing of it in a pipe."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from test_cli import environment, on_a_terminal, run

from incremental_ckpt import Checkpointer, Repository, open_store
from incremental_ckpt.exporting import export

VERBS: dict[str, tuple[str, ...]] = {
    "compacting": ("compact", "{store}"),
    "pruning": ("prune", "{store}", "--keep-last", "1"),
    "exporting": ("export", "{store}", "{folder}/out.pt"),
    "importing": ("import", "{folder}/model.pt", "{folder}/new", "--table", "users"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a chain and a base on top, and its model in a file."""
    folder = tmp_path_factory.mktemp("written")
    model = torch.nn.ModuleDict({"users": torch.nn.EmbeddingBag(20_000, 16, sparse=True)})
    with Checkpointer(model, folder / "store", kind="consecutive") as ckpt:
        ckpt.resume_from_checkpoint()
        for step in range(3):
            ckpt.save_checkpoint(step, kind="full" if step == 2 else None).wait()
    export(Repository(open_store(folder / "store")), folder / "model.pt")
    return folder


def arguments(what: str, written: Path, tmp_path: Path) -> list[str]:
    folder = shutil.copytree(written, tmp_path / "copy")
    command = [each.format(store=folder / "store", folder=folder) for each in VERBS[what]]
    return [*command, "--seq", "2"] if what == "compacting" else command


@pytest.mark.parametrize("what", VERBS)
def test_a_verb_ends_its_bar_at_all_bytes_and_leaves_its_answer(what: str, written: Path, tmp_path: Path) -> None:
    code, shown = on_a_terminal(arguments(what, written, tmp_path), environment(TERM="xterm-256color", COLUMNS="120"))
    assert code == 0, shown
    assert what in shown
    done, total = re.findall(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?) [kM]B", shown)[-1]
    assert done == total != "0"
    answer = shown[shown.rindex("\x1b[2K") :]
    assert what not in answer, "the bar is gone from the screen"
    assert "seq" in answer or "freed" in answer


@pytest.mark.parametrize("what", ["compacting", "pruning"])
def test_nothing_of_a_bar_is_in_a_pipe(what: str, written: Path, tmp_path: Path) -> None:
    done = run(*arguments(what, written, tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert what not in done.stdout
    assert "\x1b" not in done.stdout
