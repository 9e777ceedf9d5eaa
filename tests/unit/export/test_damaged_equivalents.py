"""Whatever is wrong with an equivalent base, all that reads a checkpoint reads the chain that it stands for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chains import Chain, copy_of, shard

from incremental_ckpt import Repository
from incremental_ckpt.compaction import compact
from incremental_ckpt.comparison import compare
from incremental_ckpt.errors import CorruptionError, FormatError, NotFoundError
from incremental_ckpt.exporting import export
from incremental_ckpt.format import layout
from incremental_ckpt.format.sealed import seal, unseal
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import TracingStore

USERS = shard("users", 300, 8)
BASE = layout.base_key(3)


@pytest.fixture(scope="module")
def written() -> MemoryStore:
    """A base and four deltas, of which the third has an equivalent base."""
    store = MemoryStore()
    chain = Chain(store)
    for first in range(5):
        chain.save([[(USERS, np.arange(first * 10, first * 10 + 30) if first else range(300))]], state=True)
    compact(chain.repository, 3)
    return store


@pytest.fixture
def store(written: MemoryStore) -> MemoryStore:
    return copy_of(written)


def put(store: MemoryStore, key: str, raw: bytes) -> None:
    store.delete([key])
    store.put(key, [raw])


def flipped(store: MemoryStore, key: str, at: int) -> None:
    raw = bytearray(store.get(key))
    raw[at] ^= 1
    put(store, key, bytes(raw))


def newer(store: MemoryStore, key: str) -> None:
    members = unseal(store.get(key), key)
    del members["digest"]
    put(store, key, seal(members | {"format": 2}))


def of_the_equivalent(store: MemoryStore, ending: str) -> str:
    return next(one.key for one in store.list("data/00000003-c") if one.key.endswith(ending))


def of_number(store: MemoryStore, seq: int, ending: str) -> str:
    return next(one.key for one in store.list(f"data/{seq:08d}-") if one.key.endswith(ending) and "-c" not in one.key)


DAMAGES: dict[str, Callable[[MemoryStore], None]] = {
    "manifest flipped": lambda store: flipped(store, BASE, 200),
    "manifest newer": lambda store: newer(store, BASE),
    "rank manifest gone": lambda store: store.delete([of_the_equivalent(store, ".json")]),
    "rank manifest flipped": lambda store: flipped(store, of_the_equivalent(store, ".json"), 100),
    "pack gone": lambda store: store.delete([of_the_equivalent(store, ".safetensors")]),
    "pack flipped": lambda store: flipped(store, of_the_equivalent(store, ".safetensors"), 5000),
}


def exported(repository: Repository, tmp_path: Path) -> Any:
    export(repository, tmp_path / "model.pt")
    return torch.load(tmp_path / "model.pt", weights_only=True)["users.weight"].numpy()


READS: dict[str, Callable[[Repository, Path], Any]] = {
    "read_table": lambda repository, _: repository.read_table("users"),
    "export": exported,
    "diff": lambda repository, _: [d.changed for d in compare(repository, 4, 5)],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_chain_is_read_in_its_place_and_a_warning_says_so(
    read: Callable[[Repository, Path], Any], damage: Callable[[MemoryStore], None], written: MemoryStore,
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    (tmp_path / "before").mkdir()
    expected = read(Repository(written), tmp_path / "before")
    assert not caplog.records
    damage(store)
    with caplog.at_level(logging.WARNING):
        found = read(Repository(store), tmp_path)
    np.testing.assert_array_equal(found, expected)
    (warning,) = caplog.messages
    assert warning.startswith("the equivalent base of seq 3 is passed over for the chain that it stands for: ")


def test_the_chain_that_is_shown_is_the_one_that_is_read(store: MemoryStore) -> None:
    assert [info.seq for info in Repository(store).chain(5)] == [3, 4, 5]
    flipped(store, BASE, 200)
    assert [info.seq for info in Repository(store).chain(5)] == [1, 2, 3, 4, 5]


def test_damage_elsewhere_is_an_error_at_once_and_no_base_is_blamed(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    lost = of_number(store, 5, ".safetensors")
    store.delete([lost])
    with pytest.raises(CorruptionError, match="missing") as raised:
        Repository(store).read_table("users")
    assert raised.value.key == lost
    assert not caplog.records


def test_damage_above_a_base_that_is_passed_over_is_named_alone(store: MemoryStore) -> None:
    flipped(store, BASE, 200)
    lost = of_number(store, 5, ".safetensors")
    store.delete([lost])
    with pytest.raises(CorruptionError) as raised:
        Repository(store).read_table("users")
    assert raised.value.key == lost
    assert BASE not in str(raised.value)


@pytest.mark.parametrize(("damage", "kind"), [("pack flipped", CorruptionError), ("manifest newer", FormatError)])
def test_where_the_chain_is_not_whole_either_the_base_is_named_first(
    damage: str, kind: type[Exception], store: MemoryStore
) -> None:
    DAMAGES[damage](store)
    lost = of_number(store, 1, ".json")
    store.delete([lost])
    with pytest.raises(kind, match=r"The chain that this equivalent base stands for is not whole either") as raised:
        Repository(store).read_table("users")
    assert lost in str(raised.value)
    named = BASE if kind is FormatError else of_the_equivalent(store, ".safetensors")
    assert str(raised.value).startswith(named)


def test_a_base_under_a_damaged_one_is_read(store: MemoryStore) -> None:
    expected = Repository(store).read_table("users")
    compact(Repository(store), 5)
    flipped(store, layout.base_key(5), 200)
    traced = TracingStore(store)
    np.testing.assert_array_equal(Repository(traced).read_table("users"), expected)
    assert traced.find("get", "data/00000003-c*")
    assert not traced.find("get", "data/00000001-*")


def test_two_damaged_bases_are_passed_over_one_after_the_other(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    expected = Repository(store).read_table("users")
    compact(Repository(store), 5)
    flipped(store, layout.base_key(5), 200)
    DAMAGES["pack gone"](store)
    np.testing.assert_array_equal(Repository(store).read_table("users"), expected)
    assert len(caplog.messages) == 2


def test_of_a_damaged_and_a_newer_base_the_upgrade_is_what_is_asked_for(store: MemoryStore) -> None:
    compact(Repository(store), 5)
    flipped(store, layout.base_key(5), 200)
    newer(store, BASE)
    store.delete([of_number(store, 1, ".json")])
    with pytest.raises(FormatError, match=f"^{BASE} is in format 2"):
        Repository(store).read_table("users")


def test_what_is_not_there_is_still_not_found(store: MemoryStore) -> None:
    flipped(store, BASE, 200)
    repository = Repository(store)
    with pytest.raises(NotFoundError, match="no table 'nobody'"):
        repository.read_table("nobody")
    with pytest.raises(NotFoundError, match="no checkpoint 9"):
        repository.chain(9)
    with pytest.raises(NotFoundError, match="no checkpoint 9"):
        compare(repository, 9, 3)


def test_a_checkpoint_that_a_prune_takes_meanwhile_is_not_found(store: MemoryStore) -> None:
    repository = Repository(store)

    def read(_: Any) -> None:
        if repository.listing().gone:
            pytest.fail("it was forgotten, and is read again")
        store.put(layout.gone_key(5), [seal({"format": 1, "seq": 5, "created": "2026-01-31T12:00:00.000000Z"})])
        raise NotFoundError("no object", key=of_number(store, 5, ".json"))

    with pytest.raises(NotFoundError, match="no checkpoint 5"):
        repository.read_along(read, 5)
