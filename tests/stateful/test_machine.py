"""Any sequence of steps, saves, failures, resumes and damage: plain torch modules and real threads, and an oracle."""

from __future__ import annotations

import atexit
import logging
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from budget import FACTOR
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

from incremental_ckpt import (
    Checkpointer,
    CorruptionError,
    Repository,
    SaveError,
    SaveHandle,
    Settings,
    StorageError,
)
from incremental_ckpt.storage.memory import MemoryStore
from incremental_ckpt.testing import FaultStore, Op, Perform

ROWS = {"users": 5, "items": 3}
KINDS = ("full", "one-shot", "consecutive", "intermittent")
State = dict[str, Any]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS["users"], 2, sparse=True)
        self.items = nn.EmbeddingBag(ROWS["items"], 2, sparse=True, mode="sum")
        self.over = nn.Linear(4, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.over(torch.cat([self.users(users), self.items(items[:, None])], dim=1)).sum()


class Process:
    """A training process with its model, optimizers and reader."""

    def __init__(self, store: FaultStore, sizes: Settings) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.position = 0
        sparse = torch.optim.Adagrad([self.model.users.weight, self.model.items.weight], lr=0.1)
        dense = torch.optim.Adam(self.model.over.parameters(), lr=0.1)
        self.optimizers = {"sparse": sparse, "dense": dense}
        self.checkpointer = Checkpointer(
            self.model, store, optimizer=self.optimizers, state={"reader": self}, settings=sizes
        )
        self.step = 0
        self.trail: tuple[int, ...] = ()

    def state_dict(self) -> State:
        return {"position": self.position}

    def load_state_dict(self, state: State) -> None:
        self.position = state["position"]

    def train(self, users: list[int], items: list[int]) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        many = max(len(users), len(items))
        picked = [torch.tensor((ids * many)[:many]) for ids in (users, items)]
        (self.model(*picked) * (1 + torch.rand(()))).backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.step += 1
        self.position += 1

    def snapshot(self) -> State:
        tensors = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for name, optimizer in self.optimizers.items():
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"{name}.{index}.{key}": torch.as_tensor(value).clone() for key, value in state.items()}
        return {
            **tensors,
            "rng": torch.get_rng_state(),
            "position": torch.tensor(self.position),
            "step": torch.tensor(self.step),
        }


@dataclass
class Faults:
    """What happens to the write after the next ``skip`` ones, if anything."""

    fate: str = ""
    skip: int = 0
    happened: bool = False
    late: list[tuple[Op, Perform]] = field(default_factory=list)

    def __call__(self, op: Op, perform: Perform) -> Any:
        if op.kind not in ("put", "put_if_absent") or not op.key.startswith(("data/", "manifests/")) or not self.fate:
            return perform(op)
        if self.skip:
            self.skip -= 1
            return perform(op)
        fate, self.fate, self.happened = self.fate, "", True
        if fate == "now":
            perform(op)
        elif fate == "late":
            self.late.append((Op(op.kind, op.key, op.index, [bytes(part) for part in op.parts]), perform))
        raise StorageError(f"injected: no answer to {op}", retryable=True)


@dataclass(frozen=True)
class Save:
    """A save as it was asked for; its number (the loss) tells which it is."""

    state: State
    step: int
    trail: tuple[int, ...]


class Machine(RuleBasedStateMachine):
    @initialize(
        pack=st.sampled_from((1, 256, 1 << 20)),
        snapshot=st.sampled_from((1, 1 << 20)),
        old_values=st.sampled_from((1, 1 << 20)),
        streamed=st.booleans(),
    )
    def begin(self, pack: int, snapshot: int, old_values: int, streamed: bool) -> None:
        self.sizes = Settings(
            pack_bytes=pack, entry_bytes=16, snapshot_bytes=snapshot, preimage_bytes=old_values, stream=streamed,
            read_threads=2, low_priority=False,
        )  # fmt: skip
        self.memory = MemoryStore()
        self.faults = Faults()
        self.saves: dict[int, Save] = {}
        self.committed: dict[int, int] = {}
        self.chains: dict[int, tuple[str, ...]] = {}
        self.damaged: set[str] = set()
        self.cut: set[str] = set()
        self.handle: SaveHandle | None = None
        self.flying = 0
        self.told = True
        self.process = self.new_process()

    def new_process(self) -> Process:
        process = Process(FaultStore(self.memory, self.faults), self.sizes)
        atexit.unregister(process.checkpointer.close)
        return process

    @rule(
        users=st.lists(st.integers(0, ROWS["users"] - 1), min_size=1, max_size=3),
        items=st.lists(st.integers(0, ROWS["items"] - 1), min_size=1, max_size=2),
    )
    def step(self, users: list[int], items: list[int]) -> None:
        self.process.train(users, items)

    @rule(kind=st.sampled_from(KINDS))
    def save(self, kind: str) -> None:
        self.land_what_flies()
        process, number = self.process, len(self.saves) + 1
        self.faults.happened = False
        try:
            handle = process.checkpointer.save_checkpoint(process.step, loss=number, kind=kind)  # type: ignore[arg-type]
        except SaveError:
            assert not self.told, "a failure is raised once"
            self.told = True
            return
        assert self.told, "a failed save is raised at the next one"
        self.saves[number] = Save(process.snapshot(), process.step, process.trail)
        process.trail = (*process.trail, number)
        self.handle, self.flying = handle, number

    @rule()
    def wait(self) -> None:
        self.land_what_flies()

    @rule(fate=st.sampled_from(("now", "late", "never")), skip=st.integers(0, 7))
    def lose_an_answer(self, fate: str, skip: int) -> None:
        self.land_what_flies()
        self.faults.fate, self.faults.skip = fate, skip

    @rule()
    def land_a_late_write(self) -> None:
        self.land_what_flies()
        if not self.faults.late:
            return
        op, perform = self.faults.late.pop(0)
        perform(op)
        self.faults.happened = True
        self.observe()

    @rule(close=st.booleans(), resume=st.booleans())
    def start_anew(self, close: bool, resume: bool) -> None:
        """A new process; the old one was closed, or died with its save on the way to the store."""
        self.land_what_flies()
        if close:
            try:
                self.process.checkpointer.close()
            except SaveError:
                assert not self.told
        self.told = True
        self.faults.late.clear()
        self.process = self.new_process()
        if resume:
            self.resume()

    @rule()
    def resume(self) -> None:
        """In the running process too."""
        self.land_what_flies()
        candidates = self.candidates()
        whole = [seq for seq in candidates if self.is_whole(seq)]
        try:
            progress = self.process.checkpointer.resume_from_checkpoint()
        except SaveError:
            assert not self.told
            self.told = True
            return
        except CorruptionError:
            assert candidates and not whole
            self.start_over()
            return
        assert self.told
        assert (progress.seq if progress else None) == (whole[0] if whole else None)
        if progress is not None:
            self.check_resumed(progress.seq)

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def resume_a_step(self, data: st.DataObject) -> None:
        self.land_what_flies()
        step = data.draw(st.sampled_from(sorted({self.saves[n].step for n in self.committed.values()})))
        seq = max(s for s, n in self.committed.items() if self.saves[n].step == step)
        try:
            progress = self.process.checkpointer.resume_from_checkpoint(step)
        except SaveError:
            assert not self.told
            self.told = True
            return
        except CorruptionError:
            assert not self.is_whole(seq)
            self.start_over()
            return
        assert self.told
        assert progress is not None
        assert progress.seq == seq
        self.check_resumed(seq)

    @precondition(lambda self: len(self.damaged) < min(2, len(self.committed)))
    @rule(data=st.data(), truncate=st.booleans())
    def damage(self, data: st.DataObject, truncate: bool) -> None:
        self.land_what_flies()
        seq = data.draw(st.sampled_from([s for s in sorted(self.committed) if self.chains[s][-1] not in self.damaged]))
        attempt = self.chains[seq][-1]
        objects = self.memory._objects.by_key
        packs = sorted(k for k in objects if attempt in k and k.endswith(".safetensors"))
        votes = [k for k in objects if attempt in k and k.endswith("rank-00000.json")]
        key = packs[data.draw(st.integers(0, len(packs) - 1))] if truncate else votes[0]
        raw = objects[key]
        objects[key] = raw[:-1] if truncate else raw[:90] + bytes([raw[90] ^ 1]) + raw[91:]
        self.damaged.add(attempt)
        if truncate:
            self.cut.add(attempt)  # no delta may be saved upon it any more

    @invariant()
    def what_is_committed_stays(self) -> None:
        if hasattr(self, "process") and (self.handle is None or self.handle.done()):
            seqs = [info.seq for info in Repository(self.memory).checkpoints()]
            assert set(self.committed) <= set(seqs)

    def teardown(self) -> None:
        if hasattr(self, "process"):
            self.land_what_flies()
            try:
                self.process.checkpointer.close()
            except SaveError:
                assert not self.told

    def land_what_flies(self) -> None:
        """Wait for the save that is on its way, and look at what it did."""
        if self.handle is None:
            return
        handle, number = self.handle, self.flying
        self.handle = None
        assert handle._finished.wait(60), "a save is stuck"
        before = set(self.committed)
        self.observe()
        if handle._error is None:
            assert self.committed[handle.wait().seq] == number
            return
        known = self.faults.happened or set(self.committed) != before or bool(self.cut)
        assert known, f"no cause for {handle._error!r}"
        self.told = False
        if number % 2:
            with pytest.raises(SaveError):
                handle.wait()
            self.told = True

    def observe(self) -> None:
        """Each checkpoint that has come into being is exactly what was saved."""
        repository = Repository(self.memory)
        for info in repository.checkpoints():
            if info.seq in self.committed:
                continue
            assert info.loss is not None
            number = int(info.loss)
            self.committed[info.seq] = number
            self.chains[info.seq] = tuple(link.attempt for link in repository.chain(info.seq))
            if self.is_whole(info.seq):
                for table in ROWS:
                    expected = self.saves[number].state[f"{table}.weight"]
                    assert repository.read_table(table, info.seq).tolist() == expected.tolist()
                assert info.seq in repository.check(deep=True).restorable

    def candidates(self) -> list[int]:
        """What a resume of the newest may take, best first: it and its ancestors."""
        if not self.committed:
            return []
        newest = max(self.committed)
        trail = {*self.saves[self.committed[newest]].trail, self.committed[newest]}
        return sorted((s for s, n in self.committed.items() if n in trail), reverse=True)

    def is_whole(self, seq: int) -> bool:
        return not self.damaged & set(self.chains[seq])

    def check_resumed(self, seq: int) -> None:
        number = self.committed[seq]
        save, process = self.saves[number], self.process
        process.step, process.trail = save.step, (*save.trail, number)
        found = process.snapshot()
        assert found.keys() == save.state.keys()
        assert not [name for name, value in save.state.items() if not torch.equal(found[name], value)]

    def start_over(self) -> None:
        """After a resume that broke off the model is undefined."""
        self.told = True
        self.process = self.new_process()


SETTINGS = settings(
    max_examples=25 * FACTOR,
    stateful_step_count=30,
    deadline=None,
    derandomize=FACTOR == 1,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    print_blob=True,
)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_any_sequence_of_deeds_leaves_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("incremental_ckpt"), "disabled", True)
    run_state_machine_as_test(Machine, settings=SETTINGS)
