"""``codec="auto"``: as few bits as the restores of a run allow, more where there are more than were foreseen."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from quantized_bag import QUICK, Bag, after_restore, entries_of_newest, resumed
from torch import nn

from incremental_ckpt import AutoCodec, Checkpointer, Repository, checkpointer, compact
from incremental_ckpt.codecs.auto import bits_for_restores
from incremental_ckpt.format.manifest import Entry, Lineage
from incremental_ckpt.planning import restores_behind
from incremental_ckpt.storage import MemoryStore


def codec_of_newest(store: str) -> str:
    """Of the weights."""
    found = {e.codec for e in entries_of_newest(store) if e.field == "weight"} - {"raw"}
    assert len(found) == 1
    return found.pop()


def life(store: str, step: int, bag: Bag, codec: str | AutoCodec = "auto", *, restore: int | None = None) -> str:
    """Resume (the newest, or that of a step), train, save: the codec of what was saved."""
    with bag.checkpointer(store, codec=codec, kind="full") as c:
        c.resume_from_checkpoint(restore)
        bag.train([step % 50, 60])
        c.save_checkpoint(step).wait()
    return codec_of_newest(store)


@pytest.mark.parametrize(("restores", "bits"), [(0, 2), (1, 2), (2, 4), (3, 4), (4, 8), (20, 8), (10**6, 8)])
def test_more_restores_get_more_bits(restores: int, bits: int) -> None:
    assert bits_for_restores(restores) == bits


def test_a_negative_number_of_restores_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        bits_for_restores(-1)


def test_a_run_resumed_more_often_than_foreseen_writes_wider_codes_from_then_on(store_name: str) -> None:
    found = [life(store_name, step, Bag(seed=step)) for step in range(1, 23)]
    # The checkpoint of a run with n restores behind it is of use in restore n + 1 only.
    assert found == ["int2", *["int4"] * 2, *["int8"] * 19]


def test_the_failure_rate_says_how_many_restores_are_foreseen(store_name: str) -> None:
    assert AutoCodec(failures_per_hour=1 / 13.5, hours=24).foreseen == 2
    assert AutoCodec(failures_per_hour=0.0, hours=24).codec_after(0) == "int2"
    assert AutoCodec(failures_per_hour=0.5, hours=100).codec_after(0) == "int8"
    three = AutoCodec(failures_per_hour=0.1, hours=30)
    assert [life(store_name, step, Bag(), three) for step in range(1, 5)] == ["int4", "int4", "int4", "int8"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"failures_per_hour": 0.1}, "together"),
        ({"failures_per_hour": -0.1, "hours": 3}, "failures_per_hour must be 0 or more"),
        ({"failures_per_hour": 0.1, "hours": float("nan")}, "hours must be 0 or more and finite"),
    ],
)
def test_an_estimate_that_makes_no_sense_is_refused(arguments: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AutoCodec(**arguments)


def test_auto_is_for_weights_only(store_name: str) -> None:
    with pytest.raises(ValueError, match="'auto' is for weights only"):
        Bag().checkpointer(store_name, optimizer_codec="auto")


def test_only_restores_behind_the_state_count_and_only_where_something_was_saved_after_them(store_name: str) -> None:
    assert life(store_name, 1, Bag()) == "int2"
    for _ in range(5):
        with Bag(seed=9).checkpointer(store_name, codec="auto") as c:
            assert c.resume_from_checkpoint() is not None  # a crash before the next save: that state is gone
    assert [life(store_name, step, Bag()) for step in (2, 3, 4)] == ["int4", "int4", "int8"]
    assert life(store_name, 5, Bag(), restore=1) == "int4"


def test_restores_are_counted_along_the_ancestors() -> None:
    lineage = (Lineage("a", 1, 0), Lineage("b", 4, 3), Lineage("c", 6, 2), Lineage("d", 7, 6))
    assert [restores_behind(lineage, seq) for seq in (1, 3, 4, 5, 6, 7, 9)] == [0, 0, 1, 1, 1, 2, 2]


def test_the_choice_is_logged_once_and_again_when_it_changes(store_name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "incremental_ckpt")
    bag = Bag()
    with bag.checkpointer(store_name, codec="auto") as c:
        for step in (1, 2):
            c.save_checkpoint(step).wait()
        c.resume_from_checkpoint()
        c.save_checkpoint(3).wait()
    assert [r.getMessage() for r in caplog.records if "codec auto" in r.getMessage()] == [
        "codec auto: weights are saved as int2 (restores behind this run: 0, foreseen: 0)",
        "codec auto: weights are saved as int4 and no longer as int2 (restores behind this run: 1, foreseen: 0)",
    ]


def test_a_chain_that_auto_has_mixed_restores_and_compacts_without_quantizing_a_row_again(store_name: str) -> None:
    expected = np.empty(0)
    bag = Bag()
    for step, codec in ((1, "int2"), (2, "int4"), (3, "int4"), (4, "int8")):
        with bag.checkpointer(store_name, codec="auto") as c:
            if step > 1:
                assert c.resume_from_checkpoint() is not None
                assert np.array_equal(bag.rows, expected)
            before = bag.rows
            bag.train([5 * step, 60 + step])
            c.save_checkpoint(step).wait()
        trained = np.flatnonzero((bag.rows != before).any(axis=1)) if step > 1 else range(len(before))
        expected = before
        expected[trained] = after_restore(bag.rows, codec)[trained]
    repository = Repository(MemoryStore(store_name))
    assert len(repository.links(4)) == 4
    compact(repository)
    (link,) = repository.links(4)
    found = [e for r in repository.rank_manifests(link.tables) for s in r.shards for e in s.entries]
    assert {e.codec for e in found if e.field == "weight"} == {"raw", "int2", "int4", "int8"}
    assert np.array_equal(resumed(store_name).rows, expected)


def test_the_optimizers_rows_keep_their_own_setting(store_name: str) -> None:
    bag = Bag()
    bag.optimizer = torch.optim.Adagrad(bag.model.parameters(), lr=0.01)
    for optimizer_codec in ("raw", "bf16"):
        with bag.checkpointer(store_name, codec="auto", optimizer_codec=optimizer_codec) as c:
            bag.train([1, 2])
            c.save_checkpoint(1, kind="full").wait()
        assert {e.codec for e in entries_of_newest(store_name) if e.field != "weight"} == {optimizer_codec}


@dataclass
class Together:
    """Ranks that are threads of one process."""

    world_size: int
    barrier: threading.Barrier = field(init=False)
    reports: dict[int, Any] = field(default_factory=dict)
    here: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world_size, timeout=60)

    @property
    def rank(self) -> int:
        rank: int = self.here.rank
        return rank

    def meet(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        self.reports[self.rank] = json.loads(json.dumps(report))
        self.barrier.wait()
        told = [self.reports[rank] for rank in range(self.world_size)]
        self.barrier.wait()
        return told


@dataclass(frozen=True)
class OfRank:
    """What one rank knows of them."""

    rank: int
    together: Together

    @property
    def world_size(self) -> int:
        return self.together.world_size

    def meet(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        self.together.here.rank = self.rank
        return self.together.meet(report)


def test_all_ranks_write_with_the_codec_that_rank_0_has_chosen(
    store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, expected in ((1, "int2"), (2, "int4")):
        together, of_ranks = Together(2), threading.local()
        monkeypatch.setattr(checkpointer, "coordinator", lambda _, ranks=of_ranks: ranks.coordinator)
        failures: list[BaseException] = []

        def rank_life(
            rank: int, step: int = step, together: Together = together, ranks: Any = of_ranks,
            failures: list[BaseException] = failures,
        ) -> None:  # fmt: skip
            ranks.coordinator = OfRank(rank, together)
            bag = Bag(seed=rank)
            model = nn.ModuleDict({f"table{rank}": bag.model})
            try:
                with Checkpointer(model, MemoryStore(store_name), codec="auto", settings=QUICK) as c:
                    c.resume_from_checkpoint()
                    c.save_checkpoint(step, kind="full").wait(30)
            except BaseException as failure:
                together.barrier.abort()
                failures.append(failure)

        threads = [threading.Thread(target=rank_life, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        repository = Repository(MemoryStore(store_name))
        by_rank: list[set[str]] = []
        for rank_manifest in repository.rank_manifests(repository.manifest(step)):
            entries: list[Entry] = [e for shard in rank_manifest.shards for e in shard.entries]
            by_rank.append({e.codec for e in entries} - {"raw"})
        assert by_rank == [{expected}, {expected}]
