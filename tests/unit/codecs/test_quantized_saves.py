"""Quantized tables through real saves and resumes: what comes back is what the codec says, rows that it cannot hold
come back exactly, and going on saving moves nothing."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from codec_oracle import LOSSY, ROWWISE, decoded_rows, encoded, ordinary, table
from torch import nn

from incremental_ckpt import Checkpointer, Repository, Settings
from incremental_ckpt.codecs import codec_named
from incremental_ckpt.format.manifest import Entry, Lineage
from incremental_ckpt.model import Field, Shard, Table
from incremental_ckpt.persist import Persister
from incremental_ckpt.rank_writer import Attempt, Content
from incremental_ckpt.restore import find, load_tables
from incremental_ckpt.snapshot import Part
from incremental_ckpt.storage import MemoryStore

ROWS, DIM = 80, 16
ODD = {3: np.nan, 17: np.inf, 40: -np.inf, 79: np.nan}
QUICK = Settings(low_priority=False)
TINY = Settings(pack_bytes=900, entry_bytes=256, low_priority=False)


class Bag:
    """A table with rows that no quantization holds, trained on a few rows at a time."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        rng = np.random.default_rng(seed)
        values = torch.from_numpy(ordinary(rng, ROWS, DIM)).to(dtype)
        for row, value in ODD.items():
            values[row, row % DIM] = value
        self.model = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, _weight=values)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    @property
    def rows(self) -> np.ndarray:
        found: np.ndarray = self.model.weight.detach().clone().view(torch.uint8).numpy()
        return found

    def train(self, rows: list[int]) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor([rows])).sum().backward()
        self.optimizer.step()

    def checkpointer(self, store: str, **arguments: Any) -> Checkpointer:
        arguments = {"optimizer": self.optimizer, "kind": "consecutive", "settings": QUICK, **arguments}
        return Checkpointer(self.model, MemoryStore(store), **arguments)


def after_restore(rows: np.ndarray, codec: str, dtype: str = "float32") -> np.ndarray:
    of = Field("weight", dtype, DIM)
    records, held = encoded(codec, rows, of)
    return np.where(held[:, None], decoded_rows(codec, records, of), rows)


def resumed(store: str, dtype: torch.dtype = torch.float32, **arguments: Any) -> Bag:
    again = Bag(seed=9, dtype=dtype)
    with again.checkpointer(store, **arguments) as c:
        assert c.resume_from_checkpoint() is not None
    return again


def entries_of_newest(store: str) -> list[Entry]:
    repository = Repository(MemoryStore(store))
    newest = repository.chain(repository.checkpoints()[-1].seq)[-1].seq
    ranks = repository.rank_manifests(repository.manifest(newest))
    return [entry for rank in ranks for shard in rank.shards for entry in shard.entries]


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

    live = torch.zeros(30, 10)
    shard = Shard("t", 50, 24, 15, 30, 4, 10, (Field("weight", "float32", 10),))
    links = repository.links(1, repository.listing())
    tables = [Table(shard, {"weight": live}, tracked=True)]
    load_tables(repository, find(repository, links, tables), tables, threads=1)
    assert np.array_equal(live.numpy(), whole[15:45, 4:14])
