"""The optimizer's rows: exact unless asked otherwise, by a codec of their own, and only by one that leaves the updates
of Adam as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adam_bag import DIM, MOMENTS, ROWS, AdamBag
from codec_oracle import CODECS, decoded_rows, encoded, field

from incremental_ckpt import Repository, compact
from incremental_ckpt.codecs import encode_values
from incremental_ckpt.codecs.chosen import NOT_FOR_OPTIMIZERS, OPTIMIZER_CODECS
from incremental_ckpt.format import manifest
from incremental_ckpt.model import Field
from incremental_ckpt.storage import MemoryStore

STEPS, LEARNING_RATE = 20, 0.01
APART = 10 ** torch.linspace(-5, 1, DIM)
"""Gradients a million times larger in the last column than in the first."""


def trained(scales: torch.Tensor = APART) -> AdamBag:
    bag = AdamBag()
    bag.train(STEPS, scales)
    return bag


def saved_and_resumed(bag: AdamBag, store: str, codec: str, optimizer_codec: str) -> AdamBag:
    with bag.checkpointer(store, codec=codec, optimizer_codec=optimizer_codec) as c:
        c.save_checkpoint(1).wait()
    again = AdamBag(seed=5)
    again.resume(store)
    return again


def after_restore(values: torch.Tensor, codec: str) -> torch.Tensor:
    """float32 ``[n, DIM]``."""
    rows = values.contiguous().view(torch.uint8).numpy().reshape(len(values), 4 * DIM)
    if codec == "raw":
        return values
    records, held = encoded(codec, rows, field(DIM))
    kept = np.where(held[:, None], decoded_rows(codec, records, field(DIM)), rows)
    return torch.from_numpy(np.ascontiguousarray(kept)).view(torch.float32)


@pytest.mark.parametrize("codec", ["auto", "int2", "int8", "bf16"])
def test_they_are_exact_by_default_however_weights_are_encoded(codec: str, store_name: str) -> None:
    bag = trained()
    with bag.checkpointer(store_name, codec=codec) as c:
        c.save_checkpoint(1).wait()
    again = AdamBag(seed=5)
    again.resume(store_name)
    for name in MOMENTS:
        assert torch.equal(again.moments[name], bag.moments[name])
    assert not torch.equal(again.weights, bag.weights)


@pytest.mark.parametrize(("codec", "optimizer_codec"), [("raw", "bf16"), ("int8", "bf16"), ("bf16", "raw")])
def test_weights_and_moments_each_come_back_as_their_own_codec_says(
    codec: str, optimizer_codec: str, store_name: str
) -> None:
    bag = trained()
    again = saved_and_resumed(bag, store_name, codec, optimizer_codec)
    assert torch.equal(again.weights, after_restore(bag.weights, codec))
    for name in MOMENTS:
        assert torch.equal(again.moments[name], after_restore(bag.moments[name], optimizer_codec))


@pytest.mark.parametrize("scale", [10.0**power for power in range(-5, 2)])
def test_the_first_update_after_a_restore_in_bf16_is_that_of_an_exact_restore_but_for_a_hundredth(
    scale: float, store_name: str
) -> None:
    for scales in (torch.full((DIM,), scale), APART * scale):
        moved = {}
        for codec in ("raw", "bf16"):
            again = saved_and_resumed(trained(scales), f"{store_name}-{scales[0]}-{codec}", "raw", codec)
            before = again.weights
            again.train(1, scales)
            moved[codec] = again.weights - before
        largest = moved["raw"].abs().max()
        assert largest > LEARNING_RATE / 2
        assert moved["bf16"].abs().max() <= 1.1 * largest
        assert (moved["bf16"] - moved["raw"]).abs().max() <= largest / 100


def first_update(bag: AdamBag, first: str, second: str) -> float:
    """The largest, in learning rates, by the moments as two codecs give them back and without a new gradient."""
    m, v = (after_restore(bag.moments[name], codec) for name, codec in zip(MOMENTS, (first, second), strict=True))
    corrected = (1 - 0.999 ** (STEPS + 1)) ** 0.5 / (1 - 0.9 ** (STEPS + 1))
    return float((corrected * 0.9 * m / ((0.999 * v).sqrt() + 1e-8)).abs().max())


@pytest.mark.parametrize("codec", sorted(NOT_FOR_OPTIMIZERS))
def test_a_codec_that_is_refused_would_make_the_first_update_a_hundred_times_too_large(codec: str) -> None:
    bag = trained()
    exact = first_update(bag, "raw", "raw")
    assert first_update(bag, "bf16", "bf16") <= 1.1 * exact
    assert first_update(bag, codec, codec) > 100 * exact
    rounded = after_restore(bag.moments["exp_avg_sq"], codec)
    assert ((rounded == 0) & (bag.moments["exp_avg_sq"] > 0)).any()


def test_int8_for_the_first_moment_alone_would_do_so_too() -> None:
    bag = trained()
    assert first_update(bag, "int8", "bf16") > 100 * first_update(bag, "raw", "raw")


@pytest.mark.parametrize("codec", sorted(NOT_FOR_OPTIMIZERS))
def test_a_codec_that_is_refused_is_refused_with_the_reason_and_what_to_use(codec: str, store_name: str) -> None:
    with pytest.raises(ValueError, match=f"'bf16', 'raw', not '{codec}'.* to 0.*second moment.*first update.*'bf16'"):
        AdamBag().checkpointer(store_name, optimizer_codec=codec)


def test_every_codec_is_either_offered_or_refused_with_a_reason() -> None:
    assert set(OPTIMIZER_CODECS) | set(NOT_FOR_OPTIMIZERS) == set(manifest.CODECS) == {"raw", *CODECS}
    assert not OPTIMIZER_CODECS & set(NOT_FOR_OPTIMIZERS)


def test_checkpoints_that_have_optimizer_rows_in_any_codec_are_read_and_compacted(
    store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bag = trained()
    with monkeypatch.context() as older:
        older.setattr("incremental_ckpt.checkpointer.OPTIMIZER_CODECS", manifest.CODECS)
        with bag.checkpointer(store_name, optimizer_codec="int8") as c:
            c.save_checkpoint(1).wait()
    expected = {name: after_restore(bag.moments[name], "int8") for name in MOMENTS}
    again = AdamBag(seed=5)
    with again.checkpointer(store_name, optimizer_codec="bf16") as c:
        assert c.resume_from_checkpoint() is not None
        assert all(torch.equal(again.moments[name], expected[name]) for name in MOMENTS)
        again.train(1, APART)
        c.save_checkpoint(2).wait()
    repository = Repository(MemoryStore(store_name))
    assert [info.rows for info in repository.checkpoints()] == [ROWS, ROWS]
    assert compact(repository, seq=1).complete
    third = AdamBag(seed=7)
    with third.checkpointer(store_name) as c:
        assert c.resume_from_checkpoint(step=1) is not None
    assert all(torch.equal(third.moments[name], expected[name]) for name in MOMENTS)
    assert repository.check(deep=True).ok


def test_fields_of_one_element_a_row_are_exact_whatever_the_codec_since_counters_are_among_them() -> None:
    """FBGEMM keeps the last iteration of each row in float32, and decays weights by how long ago that was."""
    rows = np.array([[100_001], [257]], np.float32).view(np.uint8)
    for name in ("sum", "prev_iter", "row_counter"):
        codec, encoded_rows = encode_values(rows, "bf16", Field(name, "float32", 1))
        assert codec == "raw"
        assert np.array_equal(encoded_rows.records, rows)
    assert encode_values(rows, "bf16", Field("weight", "float32", 1))[0] == "bf16"
