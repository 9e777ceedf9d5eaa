"""Which rows differ between two checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from chains import Chain, shard

from incremental_ckpt import Repository
from incremental_ckpt.compaction import compact
from incremental_ckpt.comparison import compare
from incremental_ckpt.errors import NotFoundError
from incremental_ckpt.testing import TracingStore

USERS, ITEMS = shard("users", 500, 16), shard("items", 40, 4, momentum=False)


@pytest.fixture
def chain() -> Chain:
    chain = Chain()
    chain.save([[(USERS, range(500)), (ITEMS, range(40))]])
    chain.save([[(USERS, np.arange(10, 30)), (ITEMS, np.arange(0))]])
    chain.save([[(USERS, np.arange(20, 50)), (ITEMS, np.array([7]))]])
    return chain


def counts(repository: Repository, a: int, b: int) -> dict[str, tuple[str, int]]:
    return {d.table: (d.what, d.changed) for d in compare(repository, a, b)}


@pytest.mark.parametrize("compacted", [False, True])
def test_changed_rows_are_counted_once_whatever_changed_them(chain: Chain, compacted: bool) -> None:
    if compacted:
        compact(chain.repository)
    assert counts(chain.repository, 1, 3) == {"items": ("changed", 1), "users": ("changed", 40)}
    assert counts(chain.repository, 3, 2) == {"items": ("changed", 1), "users": ("changed", 30)}
    assert counts(chain.repository, 2, 2) == {"items": ("same", 0), "users": ("same", 0)}
    (_, users) = compare(chain.repository, 1, 2)
    assert users.fields == {"weight": 20, "momentum1": 20}


def test_rows_that_both_have_from_one_place_are_not_read(chain: Chain) -> None:
    store = TracingStore(chain.repository.store)
    compare(Repository(store), 1, 2)
    items = chain.repository.rank_manifests(chain.repository.manifest(1))[0].shards[1].entries[0].at
    assert not [t for t in store.find("get", "data/00000001-*.safetensors") if t.op.start == items.begin]


def test_other_tables_and_shapes_are_named() -> None:
    chain = Chain()
    chain.save([[(USERS, range(500)), (ITEMS, range(40))]])
    wider, more = shard("users", 500, 8), shard("more", 3, 4)
    chain.save([[(wider, range(500)), (more, range(3))]], kind="base")
    assert counts(chain.repository, 1, 2) == {
        "items": ("removed", 40), "more": ("added", 3), "users": ("other shape", 500)
    }  # fmt: skip


def test_a_checkpoint_that_is_not_there_is_named(chain: Chain) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint 9"):
        compare(chain.repository, 1, 9)
