"""A reader paired with what was trained: its state follows the trainer, however far ahead it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from incremental_ckpt.arguments import state_objects
from incremental_ckpt.reading import PairedReader

EPOCH = 5
STATEFUL = "give torchdata's StatefulDataLoader"


def test_a_data_loader_without_a_state_is_refused_in_favour_of_one_that_has_it() -> None:
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4)))
    with pytest.raises(TypeError) as paired:
        PairedReader(loader)
    with pytest.raises(TypeError) as state:
        state_objects({"reader": loader})
    for error in (str(paired.value), str(state.value)):
        assert "a DataLoader has no state_dict() and no load_state_dict()" in error
        assert STATEFUL in error
        assert " at 0x" not in error
    assert str(state.value).startswith("state['reader'] takes an object with state_dict() and load_state_dict(); ")


def test_another_reader_is_told_what_it_lacks_and_is_not_drawn() -> None:
    class Half:
        state_dict = dict

        def __repr__(self) -> str:
            raise AssertionError("it may be of any size")

    half: Any = Half()
    with pytest.raises(TypeError, match=r"a Half has no __iter__\(\) and no load_state_dict\(\)$"):
        PairedReader(half)
    with pytest.raises(TypeError, match=r"a Half has no load_state_dict\(\)$"):
        state_objects({"half": half})
    with pytest.raises(TypeError, match=r"^state takes objects by name, .* not Half$"):
        state_objects(half)
    with pytest.raises(TypeError, match="not the class Numbers"):
        state_objects({"numbers": Numbers})


class Numbers:
    """0 to 4, epoch after epoch; the state is a live dict, as careless readers have it."""

    def __init__(self) -> None:
        self.live = {"epoch": 0, "position": 0}

    def __iter__(self) -> Iterator[int]:
        while self.live["position"] < EPOCH:
            self.live["position"] += 1
            yield self.live["epoch"] * EPOCH + self.live["position"] - 1
        self.live["epoch"] += 1
        self.live["position"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.live

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.live = dict(state)


class ReadsAhead:
    """Trains the oldest of up to ``depth`` batches that it holds, as TorchRec's pipelines do."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.held: list[int] = []
        self.iterator: Iterator[int] | None = None

    def progress(self, dataloader_iter: Iterator[int]) -> int:
        if self.iterator is not dataloader_iter:
            self.iterator, self.ended = dataloader_iter, False
        while not self.ended and len(self.held) < self.depth:
            try:
                self.held.append(next(dataloader_iter))
            except StopIteration:
                self.ended = True
        if not self.held:
            raise StopIteration
        return self.held.pop(0)


def train(paired: PairedReader[int], pipeline: ReadsAhead, steps: int) -> list[int]:
    trained: list[int] = []
    while len(trained) < steps:
        if (output := paired.progress(pipeline)) is not None:
            trained.append(output)
    return trained


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("stops", [[1, 3, 7], [5, 10, 12], [4, 5, 6], [2, 2, 11]])
def test_what_was_read_ahead_is_read_again_after_every_resume(depth: int, stops: list[int]) -> None:
    trained: list[int] = []
    state: Any = None
    for stop in [*stops, 17]:
        paired = PairedReader(Numbers())
        if state is not None:
            paired.load_state_dict(state)
        trained += train(paired, ReadsAhead(depth), stop - len(trained))
        state = dict(paired.state_dict())
    assert trained == list(range(17))


def test_the_state_is_that_after_the_last_batch_trained() -> None:
    paired = PairedReader(Numbers())
    batches = iter(paired)
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    assert paired.state_dict() == {"epoch": 0, "position": 0}
    paired.trained()
    assert paired.state_dict() == {"epoch": 0, "position": 1}
    paired.trained(2)
    assert paired.state_dict() == {"epoch": 0, "position": 3}
    assert paired.ahead == 0


def test_a_resume_forgets_what_was_read_ahead() -> None:
    paired = PairedReader(Numbers())
    train(paired, ReadsAhead(3), 2)
    paired.load_state_dict({"epoch": 4, "position": 1})
    assert paired.ahead == 0
    assert train(paired, ReadsAhead(3), 2) == [21, 22]


def test_the_rest_of_a_resumed_epoch_draws_nothing_from_the_global_generator_when_it_begins() -> None:
    class Draws(Numbers):
        def __iter__(self) -> Iterator[int]:
            torch.rand(1)
            return super().__iter__()

    paired = PairedReader(Draws())
    paired.load_state_dict({"epoch": 0, "position": 3})
    before = torch.get_rng_state()
    assert [*paired] == [3, 4]
    assert torch.equal(torch.get_rng_state(), before)
    assert [*paired] == [5, 6, 7, 8, 9]  # this one begins here in a run that was never stopped as well
    assert not torch.equal(torch.get_rng_state(), before)


def test_an_iteration_from_before_a_resume_ends_without_reading_on() -> None:
    reader = Numbers()
    paired = PairedReader(reader)
    batches = iter(paired)
    next(batches)
    paired.load_state_dict({"epoch": 0, "position": 3})
    with pytest.raises(RuntimeError, match="anew"):
        next(batches)
    assert reader.live == {"epoch": 0, "position": 3}


def test_a_forgotten_trained_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="trained"):
        for _ in PairedReader(Numbers(), ahead=3):
            pass


def test_more_trained_than_read_is_noticed() -> None:
    paired = PairedReader(Numbers())
    next(iter(paired))
    paired.trained()
    with pytest.raises(RuntimeError, match="more batches"):
        paired.trained()


def test_a_pipeline_that_trained_past_the_reader_is_noticed() -> None:
    paired, pipeline = PairedReader(Numbers()), ReadsAhead(3)
    paired.progress(pipeline)
    assert paired._iterator is not None
    while paired.ahead > 1 or not pipeline.ended:  # not through this reader
        pipeline.progress(paired._iterator)
        if pipeline.ended and not pipeline.held:
            break
    with pytest.raises(RuntimeError, match="not trained"):
        paired.progress(pipeline)


def test_reading_nothing_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match="ahead"):
        PairedReader(Numbers(), ahead=0)
