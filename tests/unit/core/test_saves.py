"""What a caller is promised of a save: told once what went wrong, nothing lost, and never two at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gates import Gate
from small_runs import Run, assert_same

from incremental_ckpt import (
    Checkpointer,
    ConflictError,
    EverySteps,
    FailureEvent,
    Repository,
    SaveError,
    SaveEvent,
    Settings,
    SkipEvent,
    StorageError,
)
from incremental_ckpt import stall as stall_module
from incremental_ckpt.snapshot import FlatState
from incremental_ckpt.storage import MemoryStore
from incremental_ckpt.testing import FaultStore, LateWrites, Stall, fail, on
from incremental_ckpt.tracker import Tracker

TIMEOUT = 60.0
TINY = Settings(pack_bytes=900, entry_bytes=256, low_priority=False)


def no_pack() -> Any:
    return fail(on("put", "data/*.safetensors", at=1))


@pytest.fixture
def store(store_name: str) -> FaultStore:
    return FaultStore(MemoryStore(store_name))


@pytest.fixture
def run() -> Run:
    return Run()


def checkpointer(run: Run, store: Any, **arguments: Any) -> Checkpointer:
    return Checkpointer(run.model, store, **run.arguments, **{"kind": "consecutive", "settings": TINY, **arguments})


def resumed(store_name: str, step: int | None = None) -> Run:
    again = Run(seed=8)
    with Checkpointer(again.model, MemoryStore(store_name), **again.arguments) as c:
        assert c.resume_from_checkpoint(step) is not None
    return again


def steps_in(store_name: str) -> list[int]:
    return [i.step for i in Repository(MemoryStore(store_name)).checkpoints()]


class TestFailures:
    def test_rows_of_a_failed_save_reappear_in_the_next_delta(
        self, run: Run, store: FaultStore, store_name: str
    ) -> None:
        with checkpointer(run, store) as c:
            run.train()
            c.save_checkpoint(1).wait()
            before = run.rows_of("tables.bag").clone()
            run.train()
            lost = (run.rows_of("tables.bag") != before).any(1)
            store.inject(no_pack())
            with pytest.raises(SaveError):
                c.save_checkpoint(2).wait()
            store.heal()
            info = c.save_checkpoint(3).wait()
        assert info.kind == "delta"
        assert info.rows >= int(lost.sum()) > 0
        assert_same(resumed(store_name).copy(), run.copy())

    def test_wait_raises_the_failure_with_its_cause_and_nobody_else_raises_it_again(
        self, run: Run, store: FaultStore, store_name: str
    ) -> None:
        with checkpointer(run, store) as c:
            store.inject(no_pack())
            handle = c.save_checkpoint(4)
            with pytest.raises(SaveError, match="step 4") as caught:
                handle.wait()
            assert isinstance(caught.value.__cause__, StorageError)
            assert handle.done()
            store.heal()
            c.save_checkpoint(5).wait()
        assert steps_in(store_name) == [5]

    @pytest.mark.parametrize("call", ["save_checkpoint", "step"])
    def test_a_failure_that_nobody_waited_for_is_raised_by_the_next_call_which_saves_nothing(
        self, run: Run, store: FaultStore, store_name: str, call: str
    ) -> None:
        with checkpointer(run, store, when=EverySteps(1)) as c:
            store.inject(no_pack())
            handle = c.save_checkpoint(1)
            assert handle._finished.wait(TIMEOUT)
            store.heal()
            with pytest.raises(SaveError, match="step 1"):
                getattr(c, call)(2)
            assert steps_in(store_name) == []
            saved = getattr(c, call)(3)
            saved.wait()
        assert steps_in(store_name) == [3]

    def test_a_failure_that_nobody_was_told_of_is_raised_by_close_once(self, run: Run, store: FaultStore) -> None:
        c = checkpointer(run, store)
        store.inject(no_pack())
        c.save_checkpoint(1)
        with pytest.raises(SaveError, match="step 1"):
            c.close()
        c.close()

    def test_a_with_block_raises_the_failure_or_notes_it_on_the_error_that_leaves_it(
        self, run: Run, store: FaultStore
    ) -> None:
        store.inject(no_pack())
        with pytest.raises(SaveError, match="step 1"), checkpointer(run, store) as c:
            c.save_checkpoint(1)
        store.heal()
        store.inject(no_pack())
        with pytest.raises(KeyError) as caught, checkpointer(run, store) as c:
            c.save_checkpoint(1)
            raise KeyError("training")
        assert "step 1" in caught.value.__notes__[0]

    def test_a_resume_raises_the_failure_of_the_save_before_it(self, run: Run, store: FaultStore) -> None:
        with checkpointer(run, store) as c:
            c.save_checkpoint(1).wait()
            store.inject(no_pack())
            c.save_checkpoint(2)
            with pytest.raises(SaveError, match="step 2"):
                c.resume_from_checkpoint()
            assert c.resume_from_checkpoint() is not None

    def test_events_tell_of_saves_and_failures_in_order(self, run: Run, store: FaultStore) -> None:
        events: list[Any] = []
        with checkpointer(run, store, on_event=events.append) as c:
            c.save_checkpoint(1).wait()
            store.inject(no_pack())
            with pytest.raises(SaveError):
                c.save_checkpoint(2).wait()
            store.heal()
            c.save_checkpoint(3)
        assert [(type(e), e.step) for e in events] == [(SaveEvent, 1), (FailureEvent, 2), (SaveEvent, 3)]
        assert events[2].chain_length == 2
        assert events[0].rows == events[0].table_rows

    @pytest.mark.parametrize("death", [KeyboardInterrupt(), SystemExit(), MemoryError(), ValueError("odd")])
    def test_whatever_breaks_the_background_ends_the_save_and_no_other(
        self, run: Run, store: FaultStore, store_name: str, death: BaseException
    ) -> None:
        def break_off(op: Any, perform: Any) -> Any:
            if op.key.startswith("manifests/") and op.kind == "put_if_absent":
                raise death
            return perform(op)

        with checkpointer(run, store) as c:
            store.inject(break_off)
            with pytest.raises(SaveError) as caught:
                c.save_checkpoint(1).wait(TIMEOUT)
            assert caught.value.__cause__ is death
            store.heal()
            run.train()
            c.save_checkpoint(2).wait(TIMEOUT)
        assert_same(resumed(store_name).copy(), run.copy())

    def test_a_failure_within_the_stall_gives_the_marks_back(
        self, run: Run, store: FaultStore, store_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with checkpointer(run, store) as c:
            run.train()
            c.save_checkpoint(1).wait()
            run.train()
            with monkeypatch.context() as patch:
                patch.setattr(stall_module, "RowCopies", _no_memory)
                with pytest.raises(MemoryError):
                    c.save_checkpoint(2)
            assert c.save_checkpoint(3).wait().kind == "delta"
        assert_same(resumed(store_name).copy(), run.copy())

    def test_state_that_cannot_be_written_is_named_and_costs_no_marks(
        self, run: Run, store: FaultStore, store_name: str
    ) -> None:
        with checkpointer(run, store) as c:
            run.train()
            c.save_checkpoint(1).wait()
            run.train()
            position, run.reader.position = run.reader.position, object()  # type: ignore[assignment]
            with pytest.raises(SaveError, match=r"reader.*position"):
                c.save_checkpoint(2)
            run.reader.position = position
            c.save_checkpoint(3).wait()
        assert_same(resumed(store_name).copy(), run.copy())

    def test_a_store_that_cannot_be_written_fails_every_save_and_loses_nothing(
        self, run: Run, store: FaultStore, store_name: str
    ) -> None:
        with checkpointer(run, store) as c:
            store.inject(fail(on(("put", "put_if_absent")), lambda op: StorageError(f"read-only: {op}")))
            for step in (1, 2):
                run.train()
                with pytest.raises(SaveError, match="read-only"):
                    c.save_checkpoint(step).wait()
            store.heal()
            c.save_checkpoint(3).wait()
        assert_same(resumed(store_name).copy(), run.copy())

    def test_a_save_between_backward_and_step_is_refused(self, store: FaultStore, store_name: str) -> None:
        run = Run("fused")
        with checkpointer(run, store) as c:
            run.train()
            loss = run.model(torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)).sum()
            loss.backward()
            with pytest.raises(SaveError, match="optimizer"):
                c.save_checkpoint(1)
            run.optimizers["dense"].step()
            c.save_checkpoint(2).wait()
        assert steps_in(store_name) == [2]


def _no_memory(*_: object) -> None:
    raise MemoryError("no room for the rows")


class TestHandles:
    def test_wait_gives_the_checkpoint_and_done_says_when(self, run: Run, store: FaultStore) -> None:
        gate = store.inject(Gate())
        with checkpointer(run, store) as c:
            handle = c.save_checkpoint(3, epoch=1, loss=torch.tensor(0.5), metrics={"auc": torch.tensor(0.75)})
            gate.wait()
            assert not handle.done()
            with pytest.raises(TimeoutError, match="step 3"):
                handle.wait(timeout=0.01)
            store.heal()
            gate.go()
            info = handle.wait()
            assert handle.done()
            assert (info.seq, info.step, info.epoch, info.loss, info.metrics) == (1, 3, 1, 0.5, {"auc": 0.75})
            assert (info.kind, info.parent, info.rows) == ("base", None, info.table_rows)
            assert handle.wait() == info

    def test_metadata_is_that_of_the_call(self, run: Run, store: FaultStore) -> None:
        gate = store.inject(Gate())
        loss, metrics = torch.tensor(1.0), {"auc": torch.tensor(0.25)}
        with checkpointer(run, store) as c:
            handle = c.save_checkpoint(1, loss=loss, metrics=metrics)
            loss.fill_(9)
            metrics["auc"].fill_(9)
            metrics["more"] = torch.tensor(9.0)
            gate.between_writes(lambda _key: None)
            info = handle.wait()
        assert (info.loss, info.metrics) == (1.0, {"auc": 0.25})

    def test_a_loss_that_is_no_number_and_steps_of_numpy_are_kept(self, run: Run, store: FaultStore) -> None:
        with checkpointer(run, store) as c:
            info = c.save_checkpoint(np.int64(7), epoch=np.int32(2), loss=float("nan")).wait()  # type: ignore[arg-type]
        assert (info.step, info.epoch) == (7, 2)
        assert info.loss != info.loss

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"step": -1}, ValueError), ({"step": 1.5}, TypeError), ({"step": 1 << 63}, ValueError),
            ({"step": 1, "epoch": 0.5}, TypeError), ({"step": 1, "epoch": -1}, ValueError),
            ({"step": 1, "kind": "sometimes"}, ValueError),
        ],
    )  # fmt: skip
    def test_what_could_not_be_written_is_refused_at_the_call(
        self, run: Run, store: FaultStore, arguments: dict[str, Any], error: type[Exception]
    ) -> None:
        with checkpointer(run, store) as c:
            with pytest.raises(error):
                c.save_checkpoint(**arguments)
            c.save_checkpoint(1).wait()


class TestBusy:
    def test_a_second_save_waits_for_the_first(self, run: Run, store: FaultStore, store_name: str) -> None:
        stall = store.inject(Stall(on("put", "data/00000001*", at=1)))
        with checkpointer(run, store) as c:
            c.save_checkpoint(1)
            assert stall.reached.wait(TIMEOUT)
            second = threading.Thread(target=lambda: c.save_checkpoint(2))
            second.start()
            assert steps_in(store_name) == []
            stall.release()
            second.join(TIMEOUT)
        assert steps_in(store_name) == [1, 2]

    def busy_steps(self, run: Run, store: FaultStore, store_name: str, busy: str) -> tuple[list[Any], list[int]]:
        """step() at 1 to 6, saves due at even steps, that of step 2 durable only after step 4; who got a handle."""
        events: list[Any] = []
        handles = []
        with checkpointer(run, store, when=EverySteps(2), busy=busy, on_event=events.append) as c:
            stall = store.inject(Stall(on("put", "data/00000001*", at=1)))
            for step in range(1, 7):
                run.train()
                handle = c.step(step, loss=torch.tensor(float(step)))
                if handle is not None:
                    handles.append(handle)
                if step == 4:
                    stall.release()
                    handles[0].wait()
            assert [h.step for h in handles] == [h.wait().step for h in handles]
        return events, steps_in(store_name)

    def test_defer_saves_as_soon_as_the_last_is_durable(self, run: Run, store: FaultStore, store_name: str) -> None:
        _, steps = self.busy_steps(run, store, store_name, "defer")
        # 4 was due and busy, so 5 makes up for it; whether 6 finds 5 durable is a matter of time.
        assert steps[:2] == [2, 5]

    def test_skip_leaves_it_out_and_says_so(self, run: Run, store: FaultStore, store_name: str) -> None:
        events, steps = self.busy_steps(run, store, store_name, "skip")
        assert steps == [2, 6]
        assert [e.step for e in events if isinstance(e, SkipEvent)] == [4]

    def test_wait_waits(self, run: Run, store: FaultStore, store_name: str) -> None:
        stall = store.inject(Stall(on("put", "data/00000001*", at=1)))
        with checkpointer(run, store, when=EverySteps(1), busy="wait") as c:
            c.step(1)
            assert stall.reached.wait(TIMEOUT)
            waiting = threading.Thread(target=lambda: c.step(2))
            waiting.start()
            assert steps_in(store_name) == []
            stall.release()
            waiting.join(TIMEOUT)
        assert steps_in(store_name) == [1, 2]

    def test_a_step_that_is_not_due_reads_neither_loss_nor_metrics(self, run: Run, store: FaultStore) -> None:
        class Unread:
            def item(self) -> float:
                raise AssertionError("read")

        with checkpointer(run, store, when=EverySteps(2)) as c:
            assert c.step(1, loss=Unread(), metrics={"auc": Unread()}) is None  # type: ignore[arg-type, dict-item]
            with pytest.raises(AssertionError, match="read"):
                c.step(2, loss=Unread())  # type: ignore[arg-type]


class TestInterrupts:
    """KeyboardInterrupt, wherever it comes: the next save carries everything."""

    @pytest.mark.parametrize("kind", ["full", "consecutive"])
    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (Tracker, "freeze"), (stall_module, "RowCopies"), (FlatState, "copy"), (stall_module, "Content"),
            (Tracker, "confirm"), (Tracker, "give_back"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("afterwards", [True, False])
    def test_an_interrupt_within_a_save_leaves_a_checkpointer_that_saves(
        self, kind: str, owner: Any, name: str, afterwards: bool, run: Run, store: FaultStore, store_name: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        original = getattr(owner, name)

        def interrupted(*arguments: Any, **named: Any) -> Any:
            if afterwards:
                original(*arguments, **named)
            raise KeyboardInterrupt

        with checkpointer(run, store) as c:
            for step in (1, 2):
                run.train()
                c.save_checkpoint(step).wait()
            run.train()
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    c.save_checkpoint(3, kind=kind)  # type: ignore[arg-type]
            run.train()
            c.save_checkpoint(4).wait(TIMEOUT)
        assert_same(resumed(store_name).copy(), run.copy())


def test_a_save_from_an_event_is_a_save_before(run: Run, store: FaultStore, store_name: str) -> None:
    steps = iter((10, 11))

    def again(event: object) -> None:
        if isinstance(event, SaveEvent) and (step := next(steps, None)) is not None:
            c.save_checkpoint(step)

    with checkpointer(run, store, on_event=again) as c:
        for step in (1, 2, 3):
            run.train()
            c.save_checkpoint(step).wait(TIMEOUT)
    assert steps_in(store_name)[:2] == [1, 10]
    assert_same(resumed(store_name).copy(), run.copy())


def test_a_forked_process_is_refused_and_closes_at_once_whoever_holds_the_lock(run: Run, store: FaultStore) -> None:
    with checkpointer(run, store) as c, c._lock:
        parent, c._process = c._process, -1  # as a fork leaves it, without the fork
        try:
            c.close()
            with pytest.raises(RuntimeError, match="forked"):
                c.save_checkpoint(1)
        finally:
            c._process = parent


def test_a_resume_of_one_checkpointer_is_noticed_by_another_one_on_the_same_model(run: Run, store_name: str) -> None:
    with checkpointer(run, MemoryStore(store_name + "b")) as other, checkpointer(run, MemoryStore(store_name)) as c:
        run.train()
        other.save_checkpoint(1).wait()
        for _ in range(5):
            run.train()
        c.save_checkpoint(20).wait()
        other.resume_from_checkpoint()
        run.train()
        c.save_checkpoint(21).wait()
    assert_same(resumed(store_name).copy(), run.copy())


class TestThreads:
    def test_saves_from_several_threads_come_one_after_another(
        self, run: Run, store: FaultStore, store_name: str
    ) -> None:
        run.train()
        failures: list[BaseException] = []
        together = threading.Barrier(4)

        def save(c: Checkpointer, number: int) -> None:
            together.wait(TIMEOUT)
            try:
                for _ in range(3):
                    c.save_checkpoint(number).wait(TIMEOUT)
            except BaseException as failure:
                failures.append(failure)

        with checkpointer(run, store) as c:
            threads = [threading.Thread(target=save, args=(c, number)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT)
        assert failures == []
        assert sorted(steps_in(store_name)) == sorted([*range(4)] * 3)


class TestClose:
    def test_close_drains_what_is_in_flight(self, run: Run, store: FaultStore, store_name: str) -> None:
        with checkpointer(run, store) as c:
            c.save_checkpoint(1)
        assert steps_in(store_name) == [1]
        for call in (lambda: c.save_checkpoint(2), lambda: c.step(2), lambda: c.resume_from_checkpoint()):
            with pytest.raises(ValueError, match="closed"):
                call()

    def test_close_leaves_a_store_of_the_callers_open_and_the_model_unwatched(
        self, run: Run, store: FaultStore, store_name: str
    ) -> None:
        mine = MemoryStore(store_name)
        with checkpointer(run, mine):
            pass
        assert list(mine.list()) == []
        assert not any(o._optimizer_step_pre_hooks for o in run.optimizers.values())

    @pytest.mark.parametrize("call", [Checkpointer.close, Checkpointer.resume_from_checkpoint])
    def test_a_store_that_does_not_answer_is_given_up_in_time(
        self, run: Run, store: FaultStore, call: Callable[[Checkpointer], None]
    ) -> None:
        stall = store.inject(Stall(on("put", "data/*", at=1)))
        c = checkpointer(run, store, settings=Settings(drain_timeout=0.05))
        handle = c.save_checkpoint(1)
        with pytest.raises(SaveError, match="drain_timeout"):
            call(c)
        stall.release()
        handle._finished.wait(TIMEOUT)
        c.close()

    def test_rows_that_change_after_a_close_that_gave_up_are_not_committed_as_the_state_of_the_call(
        self, run: Run, store: FaultStore, store_name: str
    ) -> None:
        stall = store.inject(Stall(on("put", "data/*", at=1)))
        c = checkpointer(run, store, settings=Settings(pack_bytes=300, entry_bytes=64, drain_timeout=0.05))
        handle = c.save_checkpoint(1)
        assert stall.reached.wait(TIMEOUT)
        with pytest.raises(SaveError):
            c.close()
        run.train(3)  # nobody watches any more
        stall.release()
        with pytest.raises(SaveError, match="changed"):
            handle.wait()
        assert steps_in(store_name) == []

    def test_memory_stays_flat_over_50_saves(self, run: Run, store: FaultStore) -> None:
        with checkpointer(run, store, settings=Settings(stream=False, low_priority=False)) as c:
            places, sizes, threads = set(), set(), set()
            for step in range(50):
                run.train()
                c.save_checkpoint(step, kind="full" if step % 3 == 0 else "consecutive").wait()
                if step > 2:
                    places.add(c._saver._snapshots._arena._memory.data_ptr())
                    sizes.add(c._saver._snapshots._arena.nbytes)
                    threads.add(threading.active_count())
            assert len(places) == len(sizes) == len(threads) == 1


class TestConflicts:
    def two(self, run: Run, store: FaultStore, store_name: str) -> tuple[Checkpointer, Checkpointer, Run]:
        """Two jobs that resumed the same checkpoint."""
        with checkpointer(run, MemoryStore(store_name)) as c:
            run.train()
            c.save_checkpoint(1).wait()
        other = Run(seed=4)
        both = checkpointer(run, store), checkpointer(other, MemoryStore(store_name))
        for c in both:
            assert c.resume_from_checkpoint() is not None
        return (*both, other)

    def test_of_two_jobs_on_one_store_one_goes_on_and_the_other_is_told_to_stop(
        self, run: Run, store: FaultStore, store_name: str
    ) -> None:
        first, second, other = self.two(run, store, store_name)
        run.train()
        other.train(2)
        first.save_checkpoint(2).wait()
        handle = second.save_checkpoint(3)
        with pytest.raises(ConflictError, match="Stop this job"):
            handle.wait()
        before = [one.key for one in store.list()]
        for _ in range(2):
            with pytest.raises(ConflictError):
                second.save_checkpoint(4)
        assert [one.key for one in store.list()] == before
        run.train()
        first.save_checkpoint(5).wait()
        first.close()
        second.close()
        assert steps_in(store_name) == [1, 2, 5]
        assert_same(resumed(store_name).copy(), run.copy())

    def test_a_job_whose_commit_got_no_answer_learns_that_another_has_gone_on_behind_it(
        self, run: Run, store: FaultStore, store_name: str
    ) -> None:
        first, second, other = self.two(run, store, store_name)
        run.train()
        store.inject(fail(on("put_if_absent", "manifests/*"), landed=True))
        store.inject(fail(on(("get", "list"), "manifests/*")))
        with pytest.raises(SaveError):
            first.save_checkpoint(2).wait()
        store.heal()
        assert steps_in(store_name) == [1, 2]
        second.resume_from_checkpoint()
        assert_same(other.copy(), run.copy())
        other.train()
        second.save_checkpoint(3).wait()
        with pytest.raises(ConflictError):
            first.save_checkpoint(4).wait()
        with pytest.raises(ConflictError):
            first.save_checkpoint(5)
        first.close()
        second.close()
        assert steps_in(store_name) == [1, 2, 3]

    @pytest.mark.parametrize("lands", ["before the next save", "during the next save"])
    @pytest.mark.parametrize("kind", ["full", "one-shot", "consecutive"])
    def test_a_commit_that_lands_late_counts_and_no_row_is_lost(
        self, run: Run, store: FaultStore, store_name: str, lands: str, kind: str
    ) -> None:
        states = {}
        with checkpointer(run, store) as c:
            run.train()
            c.save_checkpoint(1).wait()
            run.train()
            late = store.inject(LateWrites(on("put_if_absent", "manifests/*", at=1)))
            with pytest.raises(SaveError):
                c.save_checkpoint(2, kind=kind).wait()  # type: ignore[arg-type]
            states[2] = run.copy()
            run.train()
            if lands == "before the next save":
                late.land_late()
            else:
                store.inject(_when_the_vote_is_written(late.land_late))
            with pytest.raises(SaveError, match="late"):
                c.save_checkpoint(3).wait()
            store.heal()
            run.train()
            for step in (4, 5):
                c.save_checkpoint(step).wait()
                states[step] = run.copy()
                run.train()
        assert steps_in(store_name) == [1, 2, 4, 5]
        for step, state in states.items():
            assert_same(resumed(store_name, step).copy(), state)


def _when_the_vote_is_written(act: Callable[[], Any]) -> Any:
    def injector(op: Any, perform: Any) -> Any:
        if op.kind == "put" and op.key.endswith("rank-00000.json"):
            act()
        return perform(op)

    return injector
