"""A reader whose state follows the batches that were trained, for trainers that read ahead.

It must not know what a batch is, nor who saves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Generic, Protocol, TypeVar

from incremental_ckpt.arguments import whole, with_state
from incremental_ckpt.surroundings import capture_rng, restore_rng

T_co = TypeVar("T_co", covariant=True)
Batch = TypeVar("Batch")
Output_co = TypeVar("Output_co", covariant=True)


class StatefulReader(Protocol[T_co]):
    """Gives batches, one epoch per ``iter()``, and can say and be told how far it is. Its random choices, if any, are
    part of its state: what it draws from a global generator while reading ahead cannot be repeated."""

    def __iter__(self) -> Iterator[T_co]: ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Pipeline(Protocol[Output_co]):
    """A trainer that takes batches from an iterator ahead of time and trains one, in order, with each call; TorchRec's
    ``TrainPipelineBase`` and ``TrainPipelineSparseDist`` are."""

    def progress(self, dataloader_iter: Iterator[Any], /) -> Output_co: ...


class PairedReader(Generic[Batch]):
    """Pairs each batch with the reader's state *after that batch*. Its own state is that of the last batch trained, so
    that a checkpoint records what was trained, not what was read.

    Register it in place of the reader (``state={"reader": paired}``), iterate over it, and say when a batch has been
    trained, before the checkpointer's ``step``::

        for batch in paired:                      while (output := paired.progress(pipeline)) is not None:
            train(batch)                              checkpointer.step(...)
            paired.trained()
            checkpointer.step(...)

    Args:
        reader: its state is copied for every batch, so it should be small.
        ahead: at most so many batches may be read and not yet trained; more mean that ``trained`` is not called.
    """

    def __init__(self, reader: StatefulReader[Batch], *, ahead: int = 16) -> None:
        with_state("reader", reader, also=("__iter__",))
        if whole("ahead", ahead) < 1:
            raise ValueError(f"ahead must be at least 1, not {ahead}")
        self._reader = reader
        self._ahead = ahead
        self._state: Any = deepcopy(reader.state_dict())
        self._read: deque[Any] = deque()
        self._iterator: Iterator[Batch] | None = None
        self._generation = 0
        self._empty_epochs = 0
        self._resumed = False

    def __iter__(self) -> Iterator[Batch]:
        """One epoch, or what is left of it.

        Raises:
            RuntimeError: more than ``ahead`` batches were read and not trained, or the reader was put back to another
                state meanwhile.
        """
        generation, iterator = self._generation, self._begin()
        while True:
            if generation != self._generation:
                raise RuntimeError("the reader was put back to another state: iterate over it anew")
            try:
                batch = next(iterator)
            except StopIteration:
                return
            if len(self._read) >= self._ahead:
                raise RuntimeError(
                    f"{self._ahead} batches were read and none of them trained: call trained() after each step (or "
                    "progress() to train), or allow more with ahead="
                )
            self._read.append(deepcopy(self._reader.state_dict()))
            yield batch

    def _begin(self) -> Iterator[Batch]:
        if not self._resumed:
            return iter(self._reader)
        # A DataLoader's iter() draws from the global generator. The run that is resumed did so when its epoch began,
        # and not here: what it drew since would not be repeated.
        self._resumed = False
        rng = capture_rng()
        iterator = iter(self._reader)
        restore_rng(rng)
        return iterator

    def trained(self, batches: int = 1) -> None:
        """The oldest batches that were read have been trained.

        Raises:
            RuntimeError: fewer were read.
        """
        for _ in range(batches):
            if not self._read:
                raise RuntimeError("more batches were trained than read: iterate over this reader, not the one in it")
            self._state = self._read.popleft()

    def progress(self, pipeline: Pipeline[Output_co]) -> Output_co | None:
        """Let a pipeline train the next batch of this epoch.

        Returns:
            What the pipeline returns, or None at the end of the epoch; the next call begins another one. A run that
            was resumed at the end of an epoch begins with None.

        Raises:
            RuntimeError: two epochs without a batch, as from a ``TrainPipelineBase`` that was not ``reset()`` after the
                last; or the pipeline was also used without this reader.
        """
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            output = pipeline.progress(self._iterator)
        except StopIteration:
            self._iterator = None
            if self._read:
                raise RuntimeError(
                    f"the pipeline has stopped, and {len(self._read)} batches that it has read are not trained: does "
                    "every call of its progress() go through this reader's?"
                ) from None
            self._empty_epochs += 1
            if self._empty_epochs > 2:  # the end of one, and what was left of it after a resume, are none
                raise RuntimeError(
                    "the pipeline has stopped before the first batch of an epoch: TrainPipelineBase has to be reset() "
                    "after each; or the reader gives nothing"
                ) from None
            return None
        self._empty_epochs = 0
        self.trained()
        return output

    @property
    def ahead(self) -> int:
        """Batches read and not yet trained."""
        return len(self._read)

    def state_dict(self) -> Any:
        """The reader's state after the last batch that was trained."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Put the reader back. Batches read ahead are forgotten: begin with a new pipeline."""
        self._state = deepcopy(state)
        self._read.clear()
        self._iterator = None
        self._generation += 1
        self._resumed = True
        self._reader.load_state_dict(state)
