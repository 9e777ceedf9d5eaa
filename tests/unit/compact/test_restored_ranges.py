"""Entries that are read straight into live memory reach over rows of newer ones: what is newer holds all the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chains import Chain, column_parts, shard, values

from incremental_ckpt.model import WEIGHT, Shard, Table
from incremental_ckpt.restore import find, load_tables

USERS = shard("users", 60, 4)


def table(of: Shard) -> Table:
    fields = {f.name: torch.full((of.rows, f.width), -1.0) for f in of.fields}
    return Table(of, fields, tracked=True)


def restored(chain: Chain, of: Shard) -> Table:
    live = table(of)
    found = find(chain.repository, chain.repository.links(chain.seq), [live])
    load_tables(chain.repository, found, [live], threads=1)
    return live


@pytest.mark.parametrize(
    "newer",
    [range(20), range(40, 60), range(10, 30), range(60), np.array([3]), np.arange(0, 60, 2), np.arange(50)],
    ids=["first", "last", "middle", "all", "one", "every other", "most"],
)
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_newer_rows_hold_wherever_they_lie(newer: np.ndarray | range, codec: str) -> None:
    chain = Chain()
    chain.save([[(USERS, range(60))]])
    chain.save([[(USERS, newer)]], codec=codec)
    chain.save([[(USERS, range(15, 18))]])
    live, expected = restored(chain, USERS), values(chain.repository, 3)
    for field in (WEIGHT, "momentum1"):
        assert live.tensors[field].numpy().tobytes() == expected["users", field]


def test_a_part_of_a_table_takes_only_its_rows() -> None:
    chain = Chain()
    chain.save([[(USERS, range(60))]])
    chain.save([[(USERS, np.arange(5, 25))]])
    part = shard("users", 60, 4, at=(10, 0), part=(30, 4))
    whole = np.frombuffer(values(chain.repository, 2)["users", WEIGHT], np.float32).reshape(60, 4)
    assert np.array_equal(restored(chain, part).tensors[WEIGHT].numpy(), whole[10:40])


def test_the_mean_of_column_shards_finds_nothing_in_its_rows() -> None:
    chain = Chain()
    halves = column_parts("users", 40, [0, 4, 8])
    chain.save([[(shard("users", 40, 8), range(40))]])
    chain.save([[(halves[0], np.arange(12))], [(halves[1], np.arange(12))]])
    whole = shard("users", 40, 8)
    live, expected = restored(chain, whole), values(chain.repository, 2)
    for field in (WEIGHT, "momentum1"):
        assert live.tensors[field].numpy().tobytes() == expected["users", field]
