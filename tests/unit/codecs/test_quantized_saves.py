"""Quantized tables through real saves and resumes: what comes back is what the codec says, rows that it cannot hold
come back exactly, and going on saving moves nothing."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from codec_oracle import LOSSY, ROWWISE, encoded, excess, field, ordinary, table
from quantized_bag import DIM, ODD, QUICK, ROWS, TINY, Bag, after_restore, entries_of_newest, resumed

from incremental_ckpt import Repository, Settings, compact
from incremental_ckpt.codecs import codec_named
from incremental_ckpt.format.manifest import Lineage
from incremental_ckpt.model import Field, Shard, Table
from incremental_ckpt.persist import Persister
from incremental_ckpt.rank_writer import Attempt, Content
from incremental_ckpt.restore import find, load_tables
from incremental_ckpt.snapshot import Part
from incremental_ckpt.storage import MemoryStore

SHORT_CHAINS = Settings(low_priority=False, chain_length=4)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_resume_brings_back_decoded_rows_and_the_exact_bytes_of_rows_that_are_not_held(
    codec: str, store_name: str
) -> None:
    bag = Bag()
    with bag.checkpointer(store_name, codec=codec) as c:
        c.save_checkpoint(1).wait()
    again = resumed(store_name).rows
    assert np.array_equal(again, after_restore(bag.rows, codec))
    assert np.array_equal(again[list(ODD)], bag.rows[list(ODD)])
    assert not np.array_equal(again, bag.rows)
    assert [e.codec for e in entries_of_newest(store_name)] == [codec, "raw"]


@pytest.mark.parametrize("codec", LOSSY)
def test_rows_of_every_kind_come_back_through_a_save_within_the_bound_or_bit_for_bit(
    codec: str, store_name: str
) -> None:
    bag = Bag()
    spread = torch.from_numpy(ordinary(np.random.default_rng(2), 8, DIM)).sign() * torch.rand(8, DIM)
    odd = {"spread": 50, "mean": 51, "beyond fp16": 52, "constant": 53, "denormal": 54, "zero": 55}
    kinds = [spread[0], spread[1] * 1e-3 + 5, spread[2] * 1e6, spread[3] * 0 + 0.1, spread[4] * 1e-40, spread[5] * 0]
    with torch.no_grad():
        bag.model.weight[50:56] = torch.stack(kinds)
    with bag.checkpointer(store_name, codec=codec) as c:
        c.save_checkpoint(1).wait()
    before, again = bag.rows, resumed(store_name).rows
    assert np.array_equal(again, after_restore(before, codec))
    of = field(DIM)
    records, held = encoded(codec, before, of)
    assert excess(codec, before[held], records[held], of).max() <= 1
    assert np.array_equal(again[~held], before[~held])
    raw = {kind for kind, row in odd.items() if not held[row]}
    # FBGEMM's scale and offset of 16 bits would lose those that are not held here, without a word.
    assert raw == (
        {"beyond fp16", "denormal"} if codec == "fp16" else {"mean", "denormal"} if codec in ROWWISE else raw
    )


@pytest.mark.parametrize("codec", ["bf16", "int4", "int2"])
def test_fifty_cycles_of_saving_resuming_and_training_drift_nowhere(codec: str, store_name: str) -> None:
    trained, of = np.arange(60, 70), field(DIM)
    others = np.setdiff1d(np.arange(ROWS), trained)
    bag = Bag()
    before = bag.rows
    first = after_restore(before, codec)[others]
    for cycle in range(50):
        with bag.checkpointer(store_name, codec=codec, settings=SHORT_CHAINS) as c:
            if cycle:
                assert c.resume_from_checkpoint() is not None
                assert np.array_equal(bag.rows, after_restore(before, codec))
                assert np.array_equal(bag.rows[others], first)
            for step in range(3):
                bag.train([int(row) for row in np.roll(trained, cycle + step)[:4]])
            before = bag.rows
            records, held = encoded(codec, before, of)
            assert excess(codec, before[held], records[held], of).max() <= 1
            c.save_checkpoint(cycle).wait()
        bag = Bag(seed=cycle)
    assert np.array_equal(resumed(store_name).rows[others], first)


def test_rows_that_are_not_held_find_their_place_in_a_base_of_many_parts(store_name: str) -> None:
    bag = Bag()
    with bag.checkpointer(store_name, codec="int8", settings=TINY) as c:
        c.save_checkpoint(1).wait()
    assert len([e for e in entries_of_newest(store_name) if e.codec == "int8"]) > 5
    assert np.array_equal(resumed(store_name).rows, after_restore(bag.rows, "int8"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_of_16_bits_come_back_as_their_codec_says(dtype: torch.dtype, store_name: str) -> None:
    name = str(dtype).removeprefix("torch.")
    bag = Bag(dtype=dtype)
    with bag.checkpointer(store_name, codec="int4") as c:
        c.save_checkpoint(1).wait()
    assert np.array_equal(resumed(store_name, dtype).rows, after_restore(bag.rows, "int4", name))


def test_saving_what_was_resumed_writes_the_same_records(store_name: str) -> None:
    bag = Bag()
    with bag.checkpointer(store_name, codec="int4") as c:
        c.save_checkpoint(1).wait()
    again = Bag(seed=9)
    with again.checkpointer(store_name, codec="int4") as c:
        c.resume_from_checkpoint()
        c.save_checkpoint(2, kind="full").wait()
    assert np.array_equal(again.rows, resumed(store_name).rows)


def test_a_chain_of_several_codecs_gives_each_row_as_its_newest_checkpoint_wrote_it(store_name: str) -> None:
    bag = Bag()
    with bag.checkpointer(store_name, codec="raw") as c:
        c.save_checkpoint(1).wait()
        expected = bag.rows
    for step, codec in ((2, "int4"), (3, "int8")):
        trained = list(range(step, 60, 5))
        with bag.checkpointer(store_name, codec=codec) as c:
            assert c.resume_from_checkpoint() is not None
            bag.train(trained)
            expected[trained] = after_restore(bag.rows, codec)[trained]
            c.save_checkpoint(step).wait()
    assert np.array_equal(resumed(store_name).rows, expected)
    values = Repository(MemoryStore(store_name)).read_table("weight")
    assert np.array_equal(values.view(np.uint8), expected)
    assert Repository(MemoryStore(store_name)).check(deep=True).ok


def test_the_training_copy_is_never_altered(store_name: str) -> None:
    bag = Bag()
    before = bag.rows
    with bag.checkpointer(store_name, codec="int2") as c:
        c.save_checkpoint(1).wait()
    assert np.array_equal(bag.rows, before)


def written_by_column_shards(store: str, values: np.ndarray, codec: str, cut: int) -> Repository:
    """Two column shards of one table on one rank, each with its own step and offset per row."""
    repository = Repository(MemoryStore(store))
    rows, width = values.shape
    parts, tables = [], []
    for place, (start, stop) in enumerate(((0, cut), (cut, width))):
        fields = (Field("weight", "float32", stop - start),)
        shard = Shard("t", rows, width, 0, rows, start, stop - start, fields)
        tables.append(Table(shard, {}, tracked=True))
        parts.append(Part(place, range(rows), (np.ascontiguousarray(values[:, start:stop]).view(np.uint8),)))
    attempt = Attempt(
        seq=1, attempt="a" * 16, kind="base", parent=None, next_parent=None, step=1, epoch=None, loss=None, metrics={},
        job="b" * 16, lineage=(Lineage("b" * 16, 1, 0),), environment={},
    )  # fmt: skip
    codecs: Mapping[str, Any] = {"weight": codec_named(codec), "optimizer": codec_named("raw")}
    content = Content(tables, (), [(parts, False)], lambda: None)
    verdict = Persister(repository, codecs, QUICK).persist(attempt, content, threading.Event())
    assert verdict.error is None
    return repository


@pytest.mark.parametrize("codec", ROWWISE)
def test_column_shards_have_their_own_scale_and_are_read_into_whole_rows(codec: str, store_name: str) -> None:
    values = ordinary(np.random.default_rng(1), 50, 24)
    values[:, 8:] *= 1000
    values[7, 2] = np.nan
    values[9, 20] = np.inf
    expected = []
    for part in (values[:, :8], values[:, 8:]):
        rows, of = table(np.ascontiguousarray(part))
        records, held = encoded(codec, rows, of)
        expected.append(np.where(held[:, None], codec_named(codec).decode(records, of), part))
    whole = np.concatenate(expected, axis=1)
    repository = written_by_column_shards(store_name, values, codec, 8)
    assert np.array_equal(repository.read_table("t").view(np.uint32), whole.view(np.uint32))

    assert compact(repository).complete
    assert np.array_equal(repository.read_table("t").view(np.uint32), whole.view(np.uint32))

    live = torch.zeros(30, 10)
    shard = Shard("t", 50, 24, 15, 30, 4, 10, (Field("weight", "float32", 10),))
    links = repository.links(1, repository.listing())
    tables = [Table(shard, {"weight": live}, tracked=True)]
    load_tables(repository, find(repository, links, tables), tables, threads=1)
    assert np.array_equal(live.numpy(), whole[15:45, 4:14])
