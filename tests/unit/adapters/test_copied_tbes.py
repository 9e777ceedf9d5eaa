"""A copy of a watched TBE is watched by nobody, and no load of the TBE itself goes unnoticed."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from adapter_oracle import Watched
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from test_fbgemm_adapter import step, tbe


def pickled(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def picklable(module: Any) -> Any:
    """Without what FBGEMM itself makes in a function, which no pickle takes."""
    for name, value in vars(module).items():
        if "<locals>" in getattr(value, "__qualname__", ""):
            setattr(module, name, print)
    return module


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": deepcopy, "pickled": pickled, "of a copy": lambda m: deepcopy(pickled(m)),
}  # fmt: skip
EVICTED = {
    "pruned_indices": torch.tensor([4, 5]), "pruned_indices_offsets": torch.tensor([0, 2]),
    "logical_table_ids": torch.tensor([1], dtype=torch.int32), "buffer_ids": torch.tensor([0], dtype=torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_what_happens_to_a_copy_is_no_mark_of_the_original(
    copy: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reset: list[Any] = []

    def reset_embedding_weight_momentum(self: Any, **_: Any) -> None:
        reset.append(self)

    monkeypatch.setattr(
        SplitTableBatchedEmbeddingBagsCodegen, "reset_embedding_weight_momentum", reset_embedding_weight_momentum
    )
    module = picklable(tbe())
    watched = Watched(module)
    twin = copy(module)
    step(twin, 1)
    twin.load_state_dict(tbe(seed=9).state_dict())
    twin.reset_embedding_weight_momentum(**EVICTED)
    watched.adapter.tables()
    assert (watched.marked, watched.whole, watched.changed()) == ({}, set(), {})
    assert len(reset) == 1
    assert reset[0] is twin, "a copy's rows are reset, and not the original's"
    step(module, 1)
    assert watched.changed() == watched.marked != {}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_a_copy_can_be_watched_and_let_go_of(copy: Callable[[Any], Any]) -> None:
    module = picklable(tbe())
    first = Watched(module)
    twin = copy(module)
    second = Watched(twin)
    step(twin, 2)
    assert second.changed() == second.marked != {}
    assert first.marked == {}
    second.adapter.unwatch()
    assert "reset_embedding_weight_momentum" not in vars(twin)


@pytest.mark.parametrize("assign", [False, True], ids=["in place", "assigned"])
@pytest.mark.parametrize("looked_up", [False, True], ids=["at the save", "at the next update"])
def test_every_load_is_noticed_without_a_hook_that_would_be_saved_with_the_model(assign: bool, looked_up: bool) -> None:
    module = tbe()
    watched = Watched(module)
    assert not module._load_state_dict_post_hooks
    module.load_state_dict(tbe(seed=9).state_dict(), assign=assign)
    if looked_up:
        step(module, 3)
    watched.adapter.tables()
    assert watched.whole == {0, 1, 2}


def test_a_load_behind_a_cache_is_noticed_by_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions tell nothing there: the cache's own traffic counts as well."""
    module = tbe()
    monkeypatch.setattr("incremental_ckpt.adapters.fbgemm.FusedTables._cached", lambda _: True)
    monkeypatch.setattr(module, "flush", lambda: None)
    watched = Watched(module)
    twin = deepcopy(module)
    twin.load_state_dict(tbe(seed=8).state_dict())
    assert watched.whole == set()
    module.load_state_dict(tbe(seed=9).state_dict())
    assert watched.whole == {0, 1, 2}
