"""The facade: picks the adapter by what the model is, wires the floors, and decides at step boundaries whether to save.

It must not know how anything is stored, copied or encoded.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Self, TypeVar, cast, get_args

import torch

from incremental_ckpt import arguments
from incremental_ckpt.adapters import adapt
from incremental_ckpt.codecs import AutoCodec, chosen_codecs
from incremental_ckpt.codecs.chosen import NOT_FOR_OPTIMIZERS, OPTIMIZER_CODECS
from incremental_ckpt.compaction.beside import Compactions, url_elsewhere
from incremental_ckpt.coordinator import coordinator
from incremental_ckpt.errors import CheckpointError, SaveError
from incremental_ckpt.events import Event, ResumeEvent, SkipEvent
from incremental_ckpt.flight import Late, SaveHandle
from incremental_ckpt.format.manifest import CODECS
from incremental_ckpt.model import Progress
from incremental_ckpt.opening import open_together
from incremental_ckpt.planning import Facts
from incremental_ckpt.policy import BusyPolicy, EverySteps, Keep, KindPolicy, When
from incremental_ckpt.preemption import Preemption
from incremental_ckpt.repository import Repository
from incremental_ckpt.resuming import RNG, SCHEDULE, USER, Resume
from incremental_ckpt.retention import Retention
from incremental_ckpt.saving import Call, Saver
from incremental_ckpt.schedule import Schedule
from incremental_ckpt.settings import Settings
from incremental_ckpt.storage import open_store
from incremental_ckpt.storage.base import Store
from incremental_ckpt.surroundings import capture_rng, describe, differences
from incremental_ckpt.tracker import Tracker
from incremental_ckpt.units import size

log = logging.getLogger("incremental_ckpt")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _one_at_a_time(method: _Method) -> _Method:
    """Calls from several threads come one after another, and none from a forked process."""

    @wraps(method)
    def locked(self: Checkpointer, *arguments: Any, **named: Any) -> Any:
        if os.getpid() != self._process:  # it has neither the thread nor the save, and the lock may be held for ever
            raise RuntimeError(
                f"this Checkpointer belongs to process {self._process}: a forked process cannot save or resume with it"
            )
        with self._lock:
            return method(self, *arguments, **named)

    return cast("_Method", locked)


class Checkpointer:
    """Saves and resumes one training run. A context manager: leaving it waits for what is in flight.

    Args:
        model: any nn.Module; sharded TorchRec modules, FBGEMM TBEs and nn.Embedding(Bag) are found in it.
        store: a local path, a URL, or a Store.
        optimizer: the dense optimizers: one, a list or a mapping of them. Fused optimizers belong to the model.
        state: more objects with ``state_dict()`` and ``load_state_dict()``, by name.
        when: at which steps ``step()`` saves: one policy or several.
        kind: ``full``, ``one-shot``, ``consecutive`` or ``intermittent`` (see policy.choose_kind).
        codec: how the tables' weights are encoded: ``raw``, ``fp16``, ``bf16``, ``int8``, ``int4``, ``int3``, ``int2``,
            or by the restores that are expected: ``auto``, or an ``AutoCodec`` with a failure rate.
        optimizer_codec: how their optimizer fields are: ``raw``, or ``bf16``, which halves them.
        keep: what is kept: ``KeepLast``, ``KeepBest``, ``KeepEvery`` or several; the rest is pruned after each save, in
            the background. None: everything.
        busy: what ``step()`` does when a save is due and the one before is not durable: ``defer`` it until it is,
            ``wait``, or ``skip`` it.
        strict: model and checkpoint must name the same tables, parameters and state objects.
        on_event: called on the training thread with each event, at the next call of the checkpointer.
        settings: sizes and time limits.

    Raises:
        FormatError: the store holds something that is not a repository.
        StorageError: the store cannot be read or written.
        ValueError, TypeError: an argument is not what it should be.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        store: str | os.PathLike[str] | Store,
        *,
        optimizer: Any = None,
        state: Mapping[str, Any] | None = None,
        when: When | Sequence[When] = EverySteps(1000),  # noqa: B008
        kind: KindPolicy = "intermittent",
        codec: str | AutoCodec = "raw",
        optimizer_codec: str = "raw",
        keep: Keep | Sequence[Keep] | None = None,
        busy: BusyPolicy = "defer",
        strict: bool = True,
        on_event: Callable[[Event], None] | None = None,
        settings: Settings = Settings(),  # noqa: B008
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind = arguments.one_of("kind", kind, get_args(KindPolicy))
        if on_event is not None:
            arguments.function("on_event", on_event, "a function of one event")
        arguments.flag("strict", strict)
        arguments.function("clock", clock, "a function that gives seconds, such as time.monotonic")
        arguments.an(Settings, "settings", settings, "Settings(...)")
        arguments.one_of("busy", busy, get_args(BusyPolicy))
        policies = arguments.policies("when", when, "due", "EverySteps(1000)", least=1)
        kept = arguments.policies("keep", () if keep is None else keep, "kept", "KeepLast(3)")
        self._user_state = arguments.state_objects({} if state is None else state)
        self._on_event = on_event
        self._settings = settings
        self._clock = clock
        if not isinstance(codec, AutoCodec):
            arguments.codec("codec", codec, CODECS | {"auto"})
        arguments.codec("optimizer_codec", optimizer_codec, OPTIMIZER_CODECS, NOT_FOR_OPTIMIZERS)
        codecs = chosen_codecs(codec, optimizer_codec)
        self._ranks = coordinator(settings.vote_timeout)
        self._opened_store = isinstance(store, str | os.PathLike)
        opened = open_together(
            self._ranks,
            lambda: (Repository(open_store(store)), adapt(model, optimizer, strict=strict)),
            self._user_state,
        )
        self._repository, self._adapter = opened.repository, opened.adapter
        self._compactions = self._compactions_of(store)
        self._tracker = Tracker(self._adapter.tables())
        self._environment = describe(self._ranks.world_size)
        self._saver = Saver(
            self._repository, self._adapter, self._tracker, self._ranks, codecs, settings,
            job=opened.job, environment=self._environment, clock=clock,
            after_commit=Retention(self._repository, kept, self._compactions).run,
        )  # fmt: skip
        self._resume = Resume(
            self._repository, self._adapter, self._user_state, settings, self._ranks,
            job=opened.job, tables_elsewhere=opened.tables, strict=strict, clock=clock,
        )  # fmt: skip
        self._schedule = Schedule(
            policies, busy, clock,
            alone=self._ranks.world_size == 1, grace=settings.grace_seconds or None,
        )  # fmt: skip
        self._preemption = Preemption(settings.grace_seconds, clock, self._lost)
        self._lock = threading.RLock()
        self._closed = False
        self._process = os.getpid()
        self._adapter.watch(self._schedule.timed(self._tracker.mark), self._tracker.mark_all)
        atexit.register(self.close)

    @_one_at_a_time
    def resume_from_checkpoint(self, step: int | None = None) -> Progress | None:
        """Put model, optimizers, state objects and random generators back to a checkpoint.

        Args:
            step: of which training step; None: the newest that is whole. Of several of one step, the newest.

        Returns:
            Where the run stands, or None if the store holds no checkpoint.

        Raises:
            NotFoundError: no checkpoint of that step.
            CorruptionError: it is damaged, and (without a step) no ancestor is whole.
            MismatchError: model and checkpoint differ; names the tables.
            FormatError: it was written by a newer version.
            SaveError: a save before it failed.
        """
        self._open()
        step = None if step is None else arguments.whole("step", step)
        self._saver.drain(self._settings.drain_timeout)
        self._saver.settle()
        self._saver.must_start_over()
        resumed = self._resume.run(step)
        if resumed is None:
            log.info("%s holds no checkpoint: training starts from the model as it is", self._repository.store.url)
            # At this very moment: of two jobs that find nothing, one is to be told.
            self._saver.planner.begin_fresh(None)
            self._saver.restart()
            return None
        source = resumed.chain[-1]
        if source.environment and (found := differences(source.environment, self._environment)):
            log.warning(
                "the run that saved seq %d had other surroundings, so it need not be repeated bit for bit: %s",
                source.seq, "; ".join(found),
            )  # fmt: skip
        self._saver.planner.begin_after(
            resumed.newest, resumed.newest_seq, resumed.chain, complete=resumed.complete, notes=resumed.notes
        )
        self._saver.restart()
        self._schedule.begin(source.step, source.epoch)
        self._schedule.load_state_dict(resumed.schedule)
        log.info(
            "resumed seq %d (step %d) from %s: chain of %d, %s in %.2f s",
            source.seq, source.step, self._repository.store.url,
            len(resumed.chain), size(resumed.bytes), resumed.seconds,
        )  # fmt: skip
        event = ResumeEvent(
            source.seq, source.step, len(resumed.chain), resumed.bytes, resumed.seconds, resumed.passed_over
        )
        self._emit([event])
        return Progress(source.seq, source.step, source.epoch, source.loss, source.metrics)

    @_one_at_a_time
    def step(
        self,
        step: int,
        *,
        epoch: int | None = None,
        loss: float | torch.Tensor | None = None,
        metrics: Mapping[str, float | torch.Tensor] | None = None,
    ) -> SaveHandle | None:
        """A step has ended (after the optimizer's step): save if it is time to.

        ``loss`` and ``metrics`` are read only if a save happens.

        Returns:
            The handle of the save, or None if none happened.

        Raises:
            SaveError, ConflictError: the save before failed (this call then saves nothing), or this one could not
                begin.
            SystemExit: after SIGTERM, once the last save is durable (see Settings.grace_seconds).
            ValueError: saves are for every epoch, and none is given.
        """
        self._open()
        step = arguments.whole("step", step)
        arguments.no_mistake(loss, metrics)
        self._schedule.check_epoch(epoch)
        self._preemption.listen()
        with self._schedule.boundary(lambda: self._saver.busy):
            self._take_in_events()
            alone = self._ranks.world_size == 1
            if alone:
                self._saver.raise_failure()  # of several ranks, all are told at the next meeting
            preempted = self._preemption.arrived or self._saver.preempted
            if not self._schedule.meets(step, epoch) and not (alone and preempted):
                return None
            call = Call(last=True) if preempted else self._schedule.call(step, epoch, busy=self._saver.busy)
            waited = 0.0
            if call.go == "save" and (preempted or self._schedule.waits):
                waited = self._wait_for_the_save_before()
            if alone and call.go != "save":
                self._agree(call, step, epoch)
                return None
            return self._save(step, epoch, loss, metrics, self._kind, call, waited)

    @_one_at_a_time
    def save_checkpoint(
        self,
        step: int,
        *,
        epoch: int | None = None,
        loss: float | torch.Tensor | None = None,
        metrics: Mapping[str, float | torch.Tensor] | None = None,
        kind: KindPolicy | None = None,
    ) -> SaveHandle:
        """Save the state of this very moment; returns when it is safe to change. Waits for a save that is in flight.

        Args:
            kind: instead of the checkpointer's own.

        Raises:
            SaveError: the save before failed and nobody has been told yet (this call then saves nothing), or this one
                could not begin.
            ConflictError: another job has gone on with this store.
        """
        self._open()
        chosen = self._kind if kind is None else arguments.one_of("kind", kind, get_args(KindPolicy))
        with self._schedule.boundary(lambda: self._saver.busy):
            self._take_in_events()
            waited = self._wait_for_the_save_before()
            if self._ranks.world_size == 1:
                self._saver.raise_failure()
            call = Call(last=self._preemption.arrived or self._saver.preempted)
            handle = self._save(step, epoch, loss, metrics, chosen, call, waited)
        assert handle is not None
        return handle

    def _wait_for_the_save_before(self) -> float:
        """Returns for how many seconds."""
        if not self._saver.busy:
            return 0.0
        begun = self._clock()
        self._saver.drain(self._settings.drain_timeout)
        return self._clock() - begun

    def _save(
        self,
        step: int,
        epoch: int | None,
        loss: float | torch.Tensor | None,
        metrics: Mapping[str, float | torch.Tensor] | None,
        kind: KindPolicy,
        call: Call,
        waited: float,
    ) -> SaveHandle | None:
        facts = Facts(
            arguments.whole("step", step),
            None if epoch is None else arguments.whole("epoch", epoch),
            None if loss is None else arguments.number("loss", loss),
            arguments.numbers("metrics", metrics),
        )
        late: Late = self._schedule.late(step, waited)
        handle = self._saver.save(
            facts, kind, self._extra_state, call, late=late, preempted=self._preemption.arrived
        )  # fmt: skip
        self._agree(self._saver.call, step, epoch)
        if handle is not None and self._saver.call.last:
            self._end(handle)
        return handle

    def _agree(self, call: Call, step: int, epoch: int | None) -> None:
        self._schedule.agreed(call, step, epoch)
        if call.go == "skip":
            if self._ranks.rank == 0:
                log.info(
                    "the save of step %d is skipped, since the one before is not durable yet (%d in a row)",
                    step, self._schedule.skipped,
                )  # fmt: skip
            self._emit([SkipEvent(step, self._schedule.skipped)])

    def _end(self, handle: SaveHandle) -> None:
        """The last save before the process is taken away.

        Raises:
            SystemExit: it is durable.
            SaveError: it failed, or is not durable in time.
        """
        try:
            handle.wait(self._preemption.remaining)
        except TimeoutError as cause:
            raise SaveError(
                f"the last save, of step {handle.step} (seq {handle.seq}), is not durable within the grace period of "
                f"{self._settings.grace_seconds:g} s (Settings.grace_seconds) after SIGTERM"
            ) from cause
        self._take_in_events()
        if self._ranks.rank == 0:
            log.warning("SIGTERM: step %d is saved as seq %d, and the process ends", handle.step, handle.seq)
        self._saver.preempted = False
        self._preemption.leave()

    def _take_in_events(self) -> None:
        """Learn from what has happened in the background, and tell of it."""
        for event in self._events():
            self._emit([event])
            interval = self._schedule.learn(event)
            if interval is not None and self._ranks.rank == 0:
                log.info("adaptive: %s", interval)
                self._emit([interval])

    def close(self) -> None:
        """Wait for what is in flight, then stop watching the model. Closing again does nothing.

        Raises:
            SaveError, ConflictError: the last save failed and nobody has been told yet.
        """
        self._close()
        self._preemption.hand_on()

    def _close(self) -> None:
        if os.getpid() == self._process:
            self._close_once()

    @_one_at_a_time
    def _close_once(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._ranks.rank == 0 and (left_out := self._schedule.left_out):
            log.warning(
                "%s, and is not made any more: call save_checkpoint(step) before the end to keep the last steps",
                left_out,
            )
        try:
            self._saver.close(self._settings.drain_timeout)
        finally:
            self._adapter.unwatch()
            if self._compactions is not None:
                self._compactions.close()
            self._emit(self._events())
            self._preemption.stop_listening()
            if self._opened_store:  # else it belongs to the caller
                self._repository.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close()
        except CheckpointError as failure:
            error.add_note(f"incremental_ckpt: the last save failed as well: {failure}")

    def _lost(self) -> str:
        step = self._saver.durable_step
        return "nothing is saved since this process began" if step is None else f"nothing is saved since step {step}"

    def _extra_state(self) -> dict[str, Any]:
        state = {USER: {name: thing.state_dict() for name, thing in self._user_state.items()}, RNG: capture_rng()}
        if self._ranks.rank == 0 and (measured := self._schedule.state_dict()):
            state[SCHEDULE] = measured
        return state

    def _compactions_of(self, store: object) -> Compactions | None:
        after = self._settings.compact_after
        if after is None:
            return None
        url = url_elsewhere(store)  # on every rank: what is wrong with it, all are to be told
        return Compactions(self._repository, url, after) if self._ranks.rank == 0 else None

    def _events(self) -> list[Event]:
        ended = self._compactions.events() if self._compactions is not None else []
        return [*self._saver.events(), *ended]

    def _emit(self, events: Sequence[Event]) -> None:
        if self._on_event is not None:
            for event in events:
                self._on_event(event)

    def _open(self) -> None:
        if self._closed:
            raise ValueError("the checkpointer is closed")
