"""Which kind a save is: Check-N-Run's predictor by hand, its traces, and chains that are not to grow for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from incremental_ckpt import Checkpointer, EverySteps, Repository, SaveEvent, Settings
from incremental_ckpt.policy import Chain, ChainLimit, choose_kind
from incremental_ckpt.storage import MemoryStore

ROWS, DIM, INTERVALS = 4000, 32, 24


@pytest.mark.parametrize(
    ("shares", "base"),
    [
        # i = 5: 1 + 1.85 = 2.85 > 6 * 0.47 = 2.82; i = 6: 1 + 2.36 = 3.36 <= 7 * 0.51 = 3.57
        ([0.26, 0.32, 0.38, 0.42, 0.47], False),
        ([0.26, 0.32, 0.38, 0.42, 0.47, 0.51], True),
        # never where each delta stays small
        ([0.01] * 50, False),
        # 1 + 0.7 = 1.7 > 3 * 0.4 = 1.2; 1 + 1.6 = 2.6 <= 4 * 0.9 = 3.6
        ([0.3, 0.4], False),
        ([0.3, 0.4, 0.9], True),
        # exactly equal: 1 + 0.5 + 0.75 = 3 * 0.75
        ([0.5, 0.75], True),
    ],
)
def test_the_predictor_is_what_a_hand_computes(shares: Sequence[float], base: bool) -> None:
    assert choose_kind("intermittent", shares).base is base


def touched_rows(generator: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    """About 26 % of the rows in an interval; over several the union grows ever more slowly: 26, 32, 37, 42, 46 %."""
    hot = np.arange(ROWS) < ROWS // 5
    return np.flatnonzero(generator.random(ROWS) < np.where(hot, 0.98, 0.08))


def written_bytes(kind: Any, store_name: str) -> tuple[int, list[str]]:
    """What a trace of intervals writes after its first base, and the kinds of the checkpoints."""
    generator = np.random.default_rng(5)
    torch.manual_seed(0)
    model = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    events: list[Any] = []
    settings = Settings(low_priority=False)
    with Checkpointer(
        model, MemoryStore(store_name), optimizer=optimizer, when=EverySteps(1), kind=kind, busy="wait",
        on_event=events.append, settings=settings,
    ) as checkpointer:  # fmt: skip
        for step in range(1, INTERVALS + 2):
            optimizer.zero_grad()
            rows = torch.from_numpy(touched_rows(generator))
            model(rows.reshape(1, -1)).sum().backward()
            optimizer.step()
            checkpointer.step(step)
    saves = [e for e in events if isinstance(e, SaveEvent)]
    assert len(saves) == INTERVALS + 1
    return sum(e.bytes for e in saves[1:]), [e.kind for e in saves]


def test_a_trace_like_check_n_runs_writes_a_half_with_intermittent_and_a_quarter_with_consecutive(
    store_name: str,
) -> None:
    full, _ = written_bytes("full", store_name + "f")
    intermittent, kinds = written_bytes("intermittent", store_name + "i")
    consecutive, _ = written_bytes("consecutive", store_name + "c")
    one_shot, _ = written_bytes("one-shot", store_name + "o")
    assert intermittent / full == pytest.approx(0.5, abs=0.06)
    assert consecutive / full == pytest.approx(0.26, abs=0.04)
    assert consecutive < intermittent < one_shot < full
    assert 2 <= kinds[1:].count("base") <= 5


class TestChainLimits:
    def test_they_are_reached_by_length_and_by_bytes(self) -> None:
        chain = Chain(length=4, bytes=1000, last_bytes=100)
        for limit, reached in [
            (ChainLimit(), False), (ChainLimit(length=5), False), (ChainLimit(length=4), True),
            (ChainLimit(bytes=1100), False), (ChainLimit(bytes=1099), True), (ChainLimit(5, 1099), True),
        ]:  # fmt: skip
            assert limit.reached(chain) is reached
            assert choose_kind("consecutive", [], chain, limit).base is reached

    def saves(self, store_name: str, settings: Settings, steps: int, kind: Any = "consecutive") -> list[SaveEvent]:
        torch.manual_seed(0)
        model = torch.nn.EmbeddingBag(500, DIM, mode="sum", sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        events: list[Any] = []
        with Checkpointer(
            model, MemoryStore(store_name), optimizer=optimizer, when=EverySteps(1), kind=kind, busy="wait",
            on_event=events.append, settings=settings,
        ) as checkpointer:  # fmt: skip
            progress = checkpointer.resume_from_checkpoint()
            done = progress.step if progress else 0
            for step in range(done + 1, done + steps + 1):
                optimizer.zero_grad()
                model(torch.arange(step % 400, step % 400 + 100).reshape(1, -1)).sum().backward()
                optimizer.step()
                checkpointer.step(step)
        return [e for e in events if isinstance(e, SaveEvent)]

    def test_a_consecutive_chain_has_at_most_so_many_checkpoints(self, store_name: str) -> None:
        saves = self.saves(store_name, Settings(chain_length=3, low_priority=False), 8)
        assert [e.chain_length for e in saves] == [1, 2, 3, 1, 2, 3, 1, 2]

    def test_a_resume_counts_on(self, store_name: str) -> None:
        settings = Settings(chain_length=3, low_priority=False)
        self.saves(store_name, settings, 2)
        assert [e.chain_length for e in self.saves(store_name, settings, 3)] == [3, 1, 2]

    def test_a_resume_never_has_to_read_more_than_allowed(self, store_name: str) -> None:
        base, delta = (e.bytes for e in self.saves(store_name + "x", Settings(low_priority=False), 2))
        allowed = base + 2 * delta + delta // 2
        saves = self.saves(store_name, Settings(chain_bytes=allowed, low_priority=False), 9)
        assert max(e.chain_length for e in saves) == 3
        repository = Repository(MemoryStore(store_name))
        for info in repository.checkpoints():
            assert sum(c.bytes for c in repository.chain(info.seq)) <= allowed

    def test_deltas_that_resumes_hang_on_one_another_are_limited_as_well(self, store_name: str) -> None:
        settings = Settings(chain_length=3, low_priority=False)
        lengths = [self.saves(store_name, settings, 1, "one-shot")[0].chain_length for _ in range(5)]
        assert lengths == [1, 2, 3, 1, 2]

    @pytest.mark.parametrize("name", ["chain_length", "chain_bytes"])
    def test_a_limit_of_nothing_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=name):
            Settings(**{name: 0})


def test_the_predictor_looks_at_deltas_of_the_same_parent_only(store_name: str) -> None:
    """Two consecutive deltas of 60 % each are no history of a one-shot delta: 1 + 1.2 <= 3 * 0.6 would not say so,
    but four of 45 % would: 1 + 1.8 > 5 * 0.45, and five: 1 + 2.25 <= 6 * 0.55."""
    torch.manual_seed(0)
    model = torch.nn.EmbeddingBag(100, DIM, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = []
    with Checkpointer(
        model, MemoryStore(store_name), optimizer=optimizer, settings=Settings(low_priority=False)
    ) as checkpointer:
        for step in range(8):
            optimizer.zero_grad()
            model(torch.arange(90).reshape(1, -1)).sum().backward()
            optimizer.step()
            kind: Any = "consecutive" if step < 6 else "intermittent"
            kinds.append(checkpointer.save_checkpoint(step, kind=kind).wait().kind)
    # Six shares of 0.9 would have asked for a base at once.
    assert kinds == ["base", *["delta"] * 7]
