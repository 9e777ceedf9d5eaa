"""A compaction that a newer version wrote is left as it is, with all that it may need; the rest is pruned."""

from __future__ import annotations

import pytest
from chains import objects
from test_pruning import chain_of, data_of, seqs

from incremental_ckpt import Repository
from incremental_ckpt.compaction import compact
from incremental_ckpt.format import layout
from incremental_ckpt.format.sealed import seal, unseal
from incremental_ckpt.policy import KeepLast
from incremental_ckpt.pruning import prune
from incremental_ckpt.storage import MemoryStore


def made_newer(store: MemoryStore, seq: int) -> Repository:
    """The equivalent base of a number, as a later version would have written it."""
    key = layout.base_key(seq)
    members = unseal(store.get(key), key)
    del members["digest"]
    store.delete([key])
    store.put(key, [seal(members | {"format": 2})])
    return Repository(store)


def test_what_nothing_of_it_needs_is_pruned_and_what_it_was_written_for_stays() -> None:
    chain = chain_of("bccbccbcc")
    compact(chain.repository, 5)
    store = chain.repository.store
    repository = made_newer(store, 5)
    before = {key for key in objects(store) if key.startswith("data/00000005-")}
    report = prune(repository, KeepLast(1), dry_run=False)
    assert report.plan.newer == (5,)
    assert report.forgotten == (1, 2, 3, 6)
    assert seqs(repository) == (4, 5, 7, 8, 9)
    assert layout.base_key(5) in objects(store)
    assert {key for key in objects(store) if key.startswith("data/00000005-")} == before
    assert any("-c" in key for key in before)


def test_what_stands_on_it_alone_is_kept_whatever_the_options_say() -> None:
    """A newer version has pruned the chain below it: this one cannot tell that 3 to 5 are whole."""
    chain = chain_of("bcooo")
    compact(chain.repository, 2)
    store = chain.repository.store
    assert prune(chain.repository, KeepLast(4), dry_run=False).forgotten == (1,)
    repository = made_newer(store, 2)
    report = prune(repository, KeepLast(1), dry_run=False)
    assert (report.plan.newer, report.forgotten) == ((2,), ())
    assert seqs(repository) == (2, 3, 4, 5)
    assert data_of(store) == {2, 3, 4, 5}


def test_one_of_a_forgotten_number_stays_with_its_data() -> None:
    chain = chain_of("bcbcbcb")
    compact(chain.repository, 4)
    store = chain.repository.store
    repository = made_newer(store, 4)
    store.put(layout.gone_key(4), [seal({"format": 1, "seq": 4, "created": "2026-01-31T12:00:00.000000Z"})])
    report = prune(repository, KeepLast(1), dry_run=False)
    assert (report.plan.newer, report.forgotten) == ((4,), (1, 2, 3, 5, 6))
    assert data_of(store) == {4, 7}
    assert layout.base_key(4) in objects(store)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_manifest_of_a_newer_version_stops_it(dry_run: bool) -> None:
    """It decides what is needed, and nobody here can read it."""
    chain = chain_of("bcb")
    store = chain.repository.store
    key = layout.manifest_key(2)
    members = unseal(store.get(key), key)
    del members["digest"]
    store.delete([key])
    store.put(key, [seal(members | {"format": 2})])
    before = objects(store)
    with pytest.raises(Exception, match="format 2, and this version reads formats up to 1: upgrade"):
        prune(Repository(store), KeepLast(1), dry_run=dry_run)
    assert objects(store) == before
