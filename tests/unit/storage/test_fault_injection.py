"""The test kit itself: faults happen where they are planned, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from incremental_ckpt.errors import ConflictError, NotFoundError, StorageError
from incremental_ckpt.storage import MemoryStore, Store
from incremental_ckpt.testing import (
    Crash,
    CrashStore,
    FaultStore,
    Injector,
    LateListing,
    LateWrites,
    Op,
    Perform,
    Stall,
    TracingStore,
    damage,
    fail,
    on,
    short_read,
)


def contents(store: Store) -> dict[str, bytes]:
    return {one.key: bytes(store.get(one.key)) for one in store.list()}


def four_writes(store: Store) -> None:
    store.put("a", [b"1"])
    store.put_if_absent("b", [b"2"])
    list(store.list())
    store.delete(["a", "b"])


class TestCrashStore:
    AFTER = ({}, {"a": b"1"}, {"a": b"1", "b": b"2"}, {"b": b"2"}, {})

    def test_without_a_death_the_writes_are_counted(self) -> None:
        store = CrashStore(MemoryStore())
        four_writes(store)
        assert (store.writes, store.crashed) == (4, False)

    @pytest.mark.parametrize("landed", [False, True])
    @pytest.mark.parametrize("die_at", [1, 2, 3, 4])
    def test_the_process_dies_at_the_kth_write(self, die_at: int, landed: bool) -> None:
        inner = MemoryStore()
        store = CrashStore(inner, die_at, landed)
        with pytest.raises(Crash):
            four_writes(store)
        assert store.crashed
        assert contents(inner) == self.AFTER[die_at if landed else die_at - 1]

    def test_the_dead_neither_read_nor_write(self) -> None:
        inner = MemoryStore()
        store = CrashStore(inner, 1, landed=True)
        with pytest.raises(Crash):
            store.put("a", [b"1"])
        operations: list[Callable[[], object]] = [
            lambda: store.put("b", [b"1"]),
            lambda: store.put_if_absent("b", [b"1"]),
            lambda: store.get("a"),
            lambda: list(store.list()),
            lambda: store.delete(["a"]),
        ]
        for operation in operations:
            with pytest.raises(Crash):
                operation()
        assert contents(inner) == {"a": b"1"}

    def test_the_inner_store_outlives_the_process(self) -> None:
        inner = MemoryStore()
        CrashStore(inner).close()
        inner.put("a", [b"1"])

    def test_a_refused_last_write_is_a_crash_all_the_same(self) -> None:
        inner = MemoryStore()
        inner.put("a", [b"0"])
        with pytest.raises(Crash):
            CrashStore(inner, 1, landed=True).put("a", [b"1"])
        assert contents(inner) == {"a": b"0"}


class TestConditions:
    def test_the_nth_matching_operation_is_hit(self) -> None:
        store = FaultStore(MemoryStore(), fail(on("put", "data/*", at=2)))
        store.put("data/1/a", [b""])
        store.put("other", [b""])
        store.put_if_absent("data/1/b", [b""])
        with pytest.raises(StorageError, match="data/1/c") as caught:
            store.put("data/1/c", [b""])
        assert caught.value.retryable
        store.put("data/1/c", [b""])
        assert list(contents(store)) == ["data/1/a", "data/1/b", "data/1/c", "other"]

    def test_a_range_of_operations_of_several_kinds_is_hit(self) -> None:
        store = FaultStore(MemoryStore(), fail(on(("put", "get"), at=range(2, 4))))
        store.put("a", [b""])
        for _ in range(2):
            with pytest.raises(StorageError):
                store.get("a")
        store.get("a")

    def test_each_key_of_a_delete_is_an_operation(self) -> None:
        inner = MemoryStore()
        store = FaultStore(inner, fail(on("delete", at=2)))
        for key in ("a", "b", "c"):
            store.put(key, [b""])
        with pytest.raises(StorageError):
            store.delete(["a", "b", "c"])
        assert list(contents(inner)) == ["b", "c"]

    def test_another_error_can_be_raised(self) -> None:
        store = FaultStore(MemoryStore(), fail(on("get"), lambda op: NotFoundError(op.key, key=op.key)))
        store.put("a", [b""])
        with pytest.raises(NotFoundError):
            store.get("a")

    def test_a_healed_store_is_sound(self) -> None:
        store = FaultStore(MemoryStore())
        store.inject(fail(on()))
        with pytest.raises(StorageError):
            store.put("a", [b"1"])
        store.heal()
        store.put("a", [b"1"])
        assert contents(store) == {"a": b"1"}


class TestFaults:
    def test_a_lost_answer_leaves_the_object(self) -> None:
        store = FaultStore(MemoryStore(), fail(on("put_if_absent", at=1), landed=True))
        with pytest.raises(StorageError):
            store.put_if_absent("a", [b"1"])
        assert store.put_if_absent("a", [b"1"]) is False
        assert contents(store) == {"a": b"1"}

    def test_a_late_write_lands_with_the_bytes_of_its_call(self) -> None:
        store = FaultStore(MemoryStore())
        late = store.inject(LateWrites(on("put_if_absent", at=1)))
        buffer = bytearray(b"first")
        with pytest.raises(StorageError):
            store.put_if_absent("a", [buffer])
        buffer[:] = b"other"
        assert contents(store) == {}
        assert late.land_late() == [True]
        assert late.land_late() == []
        assert contents(store) == {"a": b"first"}

    def test_a_late_write_meets_what_was_written_meanwhile(self) -> None:
        store = FaultStore(MemoryStore())
        late = store.inject(LateWrites(on("put_if_absent", at=1)))
        with pytest.raises(StorageError):
            store.put_if_absent("a", [b"first"])
        assert store.put_if_absent("a", [b"second"])
        assert late.land_late() == [False]
        assert contents(store) == {"a": b"second"}

    def test_a_stalled_write_goes_on_when_it_is_released(self) -> None:
        store = FaultStore(MemoryStore())
        stall = store.inject(Stall(on("put")))
        with ThreadPoolExecutor(1) as pool:
            write = pool.submit(store.put, "a", [b"1"])
            assert stall.reached.wait(60)
            assert contents(store) == {}
            stall.release()
            write.result(60)
        assert contents(store) == {"a": b"1"}

    def test_a_read_is_cut_short(self) -> None:
        store = FaultStore(MemoryStore(), short_read(on("get"), keep=3))
        store.put("a", [b"12345"])
        assert bytes(store.get("a")) == b"123"

    @pytest.mark.parametrize("into", [False, True])
    def test_damage_shows_in_every_read_that_covers_it(self, into: bool) -> None:
        inner = MemoryStore()
        store = FaultStore(inner, damage(on("get", "a"), at=3, mask=0x80))
        store.put("a", [b"00000"])
        store.put("b", [b"00000"])

        def read(key: str, start: int, end: int) -> bytes:
            return bytes(store.get(key, start, end, memoryview(bytearray(end - start)) if into else None))

        assert read("a", 0, 5) == b"000\xb00"
        assert read("a", 3, 4) == b"\xb0"
        assert read("a", 0, 3) == b"000"
        assert read("a", 4, 5) == b"0"
        assert read("b", 0, 5) == b"00000"
        assert contents(inner) == {"a": b"00000", "b": b"00000"}

    def test_damage_can_be_placed_from_the_end(self) -> None:
        store = FaultStore(MemoryStore(), damage(on("get"), at=-1))
        store.put("a", [b"000"])
        assert bytes(store.get("a")) == b"001"

    def test_a_late_listing_hides_the_newest_objects(self) -> None:
        store = FaultStore(MemoryStore(), LateListing(newest=2))
        for key in ("c", "b", "a"):
            store.put(key, [b""])
        assert [one.key for one in store.list()] == ["c"]
        store.get("a")

    def test_injectors_are_passed_from_the_first_to_the_last(self) -> None:
        passed: list[str] = []

        def passing(name: str) -> Injector:
            def injector(op: Op, perform: Perform) -> object:
                passed.append(f"into {name}")
                result = perform(op)
                passed.append(f"out of {name}")
                return result

            return injector

        store = FaultStore(MemoryStore(), passing("first"))
        store.inject(passing("second"))
        store.put("a", [b""])
        assert passed == ["into first", "into second", "out of second", "out of first"]


class TestTracingStore:
    def test_operations_are_remembered_with_their_order_and_bytes(self) -> None:
        store = TracingStore(MemoryStore())
        store.put("data/pack", [b"123", b"45"])
        store.put_if_absent("manifests/1", [b"6"])
        store.get("data/pack", 1, 3)
        assert [(one.op.kind, one.op.key, one.op.index, one.size) for one in store.trace] == [
            ("put", "data/pack", 1, 5),
            ("put_if_absent", "manifests/1", 2, 1),
            ("get", "data/pack", 3, 2),
        ]
        pack, manifest = store.find("put", "data/*")[0], store.find(key="manifests/*")[0]
        assert pack.ended < manifest.began
        assert (store.moved("put"), store.moved("get", "data/*"), store.moved("get", "q")) == (5, 2, 0)

    def test_operations_that_failed_are_not_among_them(self) -> None:
        store = TracingStore(MemoryStore())
        store.put("a", [b"1"])
        with pytest.raises(ConflictError):
            store.put("a", [b"2"])
        assert len(store.find("put")) == 1

    def test_overlapping_operations_show_that_they_overlap(self) -> None:
        faults = FaultStore(MemoryStore())
        stall = faults.inject(Stall(on("put", "slow")))
        store = TracingStore(faults)
        slow = threading.Thread(target=store.put, args=("slow", [b""]))
        slow.start()
        assert stall.reached.wait(60)
        store.put("fast", [b""])
        stall.release()
        slow.join(60)
        fast, ended_last = store.trace
        assert (fast.op.key, ended_last.op.key) == ("fast", "slow")
        assert ended_last.began < fast.began < fast.ended < ended_last.ended
