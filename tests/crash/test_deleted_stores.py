"""Over every store: one that is emptied under a run fails the next save, and the save after it brings the run back."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import BUCKET_ON_LOOPBACK, PLACES
from small_runs import Run, assert_same

from incremental_ckpt import Checkpointer, SaveError, Settings

SETTINGS = Settings(low_priority=False)


@pytest.fixture(scope="module", autouse=True)
def _bucket() -> object:
    yield
    BUCKET_ON_LOOPBACK.stop()


@pytest.mark.parametrize("name", PLACES)
def test_a_store_that_is_emptied_under_a_run_holds_it_again_after_the_next_save_but_one(
    name: str, tmp_path: Path
) -> None:
    run, again = Run(), Run(seed=8)
    with PLACES[name](tmp_path) as open_again:
        with Checkpointer(run.model, open_again(), **run.arguments, kind="consecutive", settings=SETTINGS) as c:
            for step in (1, 2):
                run.train()
                c.save_checkpoint(step).wait()
            store = open_again()
            store.delete([one.key for one in store.list()])
            with pytest.raises(SaveError, match=r"step 3 .* what it counts from has gone"):
                c.save_checkpoint(3).wait()
            run.train()
            assert c.save_checkpoint(4).wait().kind == "base"
            run.train()
            assert c.save_checkpoint(5).wait().kind == "delta"
        with Checkpointer(again.model, open_again(), **again.arguments) as c:
            progress = c.resume_from_checkpoint()
    assert progress is not None
    assert progress.step == 5
    assert_same(again.copy(), run.copy())
