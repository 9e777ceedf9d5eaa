"""A process that ends without close() still makes durable what is in flight, and says what failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from incremental_ckpt import Repository, open_store

SCRIPT = """
import sys, torch
from incremental_ckpt import Checkpointer, Settings
from incremental_ckpt.storage import LocalStore
from incremental_ckpt.testing import FaultStore, Stall, fail, on
model = torch.nn.EmbeddingBag(1000, 8)
store = FaultStore(LocalStore(sys.argv[1]))
stall = store.inject(Stall(on("put", "data/*", at=1)))
if sys.argv[2] == "fail":
    store.inject(fail(on("put", "*/rank-00000.json")))
checkpointer = Checkpointer(model, store, settings=Settings(pack_bytes=4000))
checkpointer.save_checkpoint(1)
assert stall.reached.wait(60)
stall.release()
"""


def run(path: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, str(path), what], capture_output=True, text=True, timeout=120)


def test_normal_exit_drains_what_is_in_flight(tmp_path: Path) -> None:
    done = run(tmp_path, "drain")
    assert done.returncode == 0, done.stderr
    assert [i.step for i in Repository(open_store(tmp_path)).checkpoints()] == [1]


def test_normal_exit_does_not_hide_a_failed_save(tmp_path: Path) -> None:
    done = run(tmp_path, "fail")
    assert "SaveError" in done.stderr
    assert "step 1" in done.stderr
    assert Repository(open_store(tmp_path)).checkpoints() == []
