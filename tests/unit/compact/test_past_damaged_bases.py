"""A compaction reads past an equivalent base that is damaged or newer, and makes the next one without it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from chains import Chain, objects, shard, values

from incremental_ckpt import Repository
from incremental_ckpt.compaction import compact
from incremental_ckpt.errors import CorruptionError
from incremental_ckpt.format import layout
from incremental_ckpt.format.sealed import seal, unseal
from incremental_ckpt.storage import Store

USERS = shard("users", 300, 8)
BASE = layout.base_key(3)


@pytest.fixture
def chain() -> Chain:
    """A base and four deltas, of which the third has an equivalent base."""
    chain = Chain()
    for first in range(5):
        chain.save([[(USERS, np.arange(first * 10, first * 10 + 30) if first else range(300))]])
    compact(chain.repository, 3)
    return chain


def put(store: Store, key: str, raw: bytes) -> None:
    store.delete([key])
    store.put(key, [raw])


def flip(store: Store, key: str, at: int) -> None:
    raw = bytearray(store.get(key))
    raw[at] ^= 1
    put(store, key, bytes(raw))


def make_newer(store: Store) -> None:
    members = unseal(store.get(BASE), BASE)
    del members["digest"]
    put(store, BASE, seal(members | {"format": 2}))


def of_the_equivalent(store: Store, ending: str) -> str:
    return next(one.key for one in store.list("data/00000003-c") if one.key.endswith(ending))


DAMAGES: dict[str, Callable[[Store], None]] = {
    "manifest flipped": lambda store: flip(store, BASE, 200),
    "manifest newer": make_newer,
    "rank manifest gone": lambda store: store.delete([of_the_equivalent(store, ".json")]),
    "pack gone": lambda store: store.delete([of_the_equivalent(store, ".safetensors")]),
    "pack flipped": lambda store: flip(store, of_the_equivalent(store, ".safetensors"), 5000),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_next_one_is_made_of_the_chain(
    damage: Callable[[Store], None], chain: Chain, caplog: pytest.LogCaptureFixture
) -> None:
    store = chain.repository.store
    expected = values(chain.repository, 5)
    damage(store)
    report = compact(Repository(store), 5)
    assert (report.chain, report.complete) == (5, True)
    (warning,) = caplog.messages
    assert warning.startswith("the equivalent base of seq 3 is passed over for the chain that it stands for: ")
    repository = Repository(store)
    assert [link.manifest.seq for link in repository.links(5)] == [5]
    assert values(repository, 5) == expected


def test_where_the_damaged_one_stands_in_its_own_place_it_says_so_and_writes_nothing(chain: Chain) -> None:
    store = chain.repository.store
    flip(store, BASE, 200)
    before = objects(store)
    with pytest.raises(CorruptionError, match=BASE) as raised:
        compact(Repository(store), 3, shard=(0, 2))
    assert "not whole either" not in str(raised.value)
    assert objects(store) == before
