"""Ranges of rows out of a chain: verified however little of an entry is wanted, and in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from chains import Chain, shard, some_rows, values

from incremental_ckpt import Repository
from incremental_ckpt.errors import CorruptionError
from incremental_ckpt.format.manifest import RankManifest
from incremental_ckpt.repository import records
from incremental_ckpt.repository.records import SpanReader, TableRecords, put_rows, take_rows
from incremental_ckpt.testing import FaultStore, TracingStore, damage, on

USERS = shard("users", 500, 16)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_BLOCK", 1024)


@pytest.fixture
def chain() -> Chain:
    chain = Chain()
    chain.save([[(USERS, range(500))]], codec="int8", unheld=True)
    for n in range(3):
        chain.save([[(USERS, some_rows(USERS, 0.1, n))]], codec="int8" if n % 2 else "raw")
    return chain


def ranks_of(repository: Repository) -> list[list[RankManifest]]:
    return [repository.rank_manifests(link.tables) for link in repository.links(4)]


@pytest.mark.parametrize("limit", [0, 4000, 10**6])
@pytest.mark.parametrize("kept_ids", [0, 10**6])
def test_any_range_reads_as_the_whole_table(chain: Chain, limit: int, kept_ids: int) -> None:
    repository = chain.repository
    table = TableRecords(SpanReader(repository, limit), ranks_of(repository), "users", kept_ids=kept_ids)
    expected = values(repository, 4)
    for field in USERS.fields:
        windows = [range(a, min(a + 37, 500)) for a in range(0, 500, 37)]
        found = b"".join(table.values(field.name, window).tobytes() for window in windows)
        assert found == expected["users", field.name]
        assert table.values(field.name, range(123, 124)).tobytes() == found[123 * field.row_bytes :][: field.row_bytes]


def test_what_is_kept_stays_within_the_limit_and_is_not_read_again(chain: Chain) -> None:
    store = TracingStore(chain.repository.store)
    repository = Repository(store)
    table = TableRecords(SpanReader(repository, 10**6), ranks_of(repository), "users")
    for begin in range(0, 500, 10):
        table.values("weight", range(begin, begin + 10))
    assert len(store.find("get", "*.safetensors")) == 3 + 1 + 4 + 1  # row sets, unheld rows' set, entries, raw entry


@pytest.mark.parametrize("limit", [0, 10**6])
def test_a_flipped_bit_is_found_however_little_is_read(chain: Chain, limit: int) -> None:
    store = FaultStore(chain.repository.store, damage(on("get", "data/00000001-*.safetensors"), at=9000))
    repository = Repository(store)
    table = TableRecords(SpanReader(repository, limit), ranks_of(repository), "users")
    with pytest.raises(CorruptionError, match="data/00000001-"):
        for begin in range(0, 500, 10):
            table.values("weight", range(begin, begin + 10))


def test_a_bit_that_flips_after_the_entry_was_verified_is_found(chain: Chain) -> None:
    store = FaultStore(chain.repository.store)
    repository = Repository(store)
    table = TableRecords(SpanReader(repository, 0), ranks_of(repository), "users")
    table.values("weight", range(10))
    store.inject(damage(on("get", "data/00000001-*.safetensors"), at=9000))
    with pytest.raises(CorruptionError, match="data/00000001-"):
        for begin in range(0, 500, 10):
            table.values("weight", range(begin, begin + 10))


def test_rows_read_from_one_place_have_one_source(chain: Chain) -> None:
    repository = chain.repository
    reader = SpanReader(repository, 10**6)
    before = TableRecords(reader, ranks_of(repository)[:-1], "users")
    after = TableRecords(reader, ranks_of(repository), "users")
    differ = before.sources("weight", range(500)) != after.sources("weight", range(500))
    assert np.flatnonzero(differ).tolist() == some_rows(USERS, 0.1, 2).tolist()


def test_rows_are_moved_as_numpy_moves_them() -> None:
    draw = np.random.default_rng(0)
    for width in (1, 3, 4, 20, 68):
        source = draw.integers(0, 256, (50, width), dtype=np.uint8)
        at = np.flatnonzero(draw.random(50) < 0.4)
        assert np.array_equal(take_rows(source, at), source[at])
        target = np.zeros((50, width), dtype=np.uint8)
        put_rows(target, at, source[at])
        assert np.array_equal(target[at], source[at])
        assert not target[np.setdiff1d(np.arange(50), at)].any()
