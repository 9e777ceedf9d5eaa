"""The names that users rely on, and what importing them may cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

import incremental_ckpt

NAMES = {
    "CheckpointError", "CheckpointInfo", "Checkpointer", "ConflictError", "CorruptionError", "EveryEpoch",
    "EverySeconds", "EverySteps", "FailureEvent", "FormatError", "MismatchError", "NotFoundError", "Progress",
    "Repository", "ResumeEvent", "SaveError", "SaveEvent", "SaveHandle", "Settings", "SkipEvent", "StorageError",
    "Store", "open_store", "KeepLast", "KeepBest", "KeepEvery", "compact", "prune", "export", "import_checkpoint",
    "AutoCodec",
}  # fmt: skip

TORCH_FREE = [
    "incremental_ckpt", "incremental_ckpt.errors", "incremental_ckpt.model", "incremental_ckpt.events",
    "incremental_ckpt.settings", "incremental_ckpt.policy", "incremental_ckpt.format.manifest",
    "incremental_ckpt.format.replay", "incremental_ckpt.format.tree", "incremental_ckpt.codecs",
    "incremental_ckpt.storage", "incremental_ckpt.repository", "incremental_ckpt.testing",
    "incremental_ckpt.compaction", "incremental_ckpt.pruning", "incremental_ckpt.comparison",
]  # fmt: skip


def test_no_public_name_is_lost() -> None:
    assert set(incremental_ckpt.__all__) >= NAMES
    for name in incremental_ckpt.__all__:
        assert getattr(incremental_ckpt, name).__name__ == name


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Checkpoynter"):
        incremental_ckpt.Checkpoynter  # noqa: B018


def test_what_the_command_line_stands_on_loads_no_torch() -> None:
    names = "from incremental_ckpt import Repository, open_store, Settings, EverySteps, SaveError, Progress, SaveEvent"
    script = (
        f"import sys, {', '.join(TORCH_FREE)}\n{names}\nprint(sorted(sys.modules.keys() & {{'torch', 'fbgemm_gpu'}}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
