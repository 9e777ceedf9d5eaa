"""The conformance tests of a store: what docs/format.md section 2 asks for, as tests to subclass.

They must not know any store. Ask pytest to show values in failures with
``pytest.register_assert_rewrite("incremental_ckpt.testing.conformance")`` in a conftest.
"""

from __future__ import annotations

import array
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from incremental_ckpt.errors import ConflictError, CorruptionError, NotFoundError, StorageError
from incremental_ckpt.storage import Store

BIG = 5 * (1 << 20) + 123
"""Bytes of an object that is neither small nor a multiple of anything."""

BAD_KEYS = ["", "/a", "a/", "a//b", ".", "..", "a/../b", "../a", "./a", ".tmp-1", "a/.b", "a b", "a\\b", "a\n", "ä"]


class StoreTests:
    """Subclass it, name the class ``Test…``, and override ``connect``::

    class TestMyStore(StoreTests):
        @pytest.fixture
        def connect(self, tmp_path):
            return lambda: MyStore(tmp_path)
    """

    many = 1001
    """Objects that make a long listing; one more than a page of S3."""

    @pytest.fixture
    def connect(self, tmp_path: Path) -> Callable[[], Store]:
        """Opens another handle on the one store, empty at first, as another process would."""
        raise NotImplementedError("override the fixture `connect`")

    @pytest.fixture
    def store(self, connect: Callable[[], Store]) -> Iterator[Store]:
        store = connect()
        yield store
        store.close()

    def test_an_object_is_the_concatenation_of_its_parts(self, store: Store) -> None:
        store.put("a/b", [b"one", bytearray(b"two"), b"", memoryview(b"xthreex")[1:-1]])
        assert bytes(store.get("a/b")) == b"onetwothree"

    def test_parts_of_any_item_type_are_written_as_bytes(self, store: Store) -> None:
        numbers = array.array("d", [1.0, 2.0, 3.0])
        store.put("a", [memoryview(numbers)])
        assert bytes(store.get("a")) == numbers.tobytes()

    @pytest.mark.parametrize("parts", [[], [b""]])
    def test_an_object_may_be_empty(self, store: Store, parts: list[bytes]) -> None:
        store.put("a", parts)
        assert store.get("a").nbytes == 0
        assert [(one.key, one.size) for one in store.list()] == [("a", 0)]

    @pytest.mark.parametrize("size", [1, 4095, 1 << 20, (1 << 20) + 1, 4 << 20, BIG])
    def test_an_object_of_any_size_comes_back(self, store: Store, size: int) -> None:
        content = _pattern(size)
        store.put("a", [content])
        assert store.get("a") == content

    def test_a_large_object_of_many_odd_parts_comes_back(self, store: Store) -> None:
        content = memoryview(_pattern(BIG))
        cuts = [0, 1, 4097, 4097, 1 << 20, (3 << 20) + 7, BIG]
        store.put("a", [content[a:b] for a, b in pairwise(cuts)])
        assert store.get("a") == content
        store.put("b", [content[at : at + 1700] for at in range(0, BIG, 1700)])
        assert store.get("b") == content

    def test_a_put_takes_a_copy_of_its_parts(self, store: Store) -> None:
        source = bytearray(b"before")
        store.put("a", [source])
        store.put_if_absent("b", [source])
        source[:] = b"after!"
        assert bytes(store.get("a")) == bytes(store.get("b")) == b"before"

    def test_a_byte_range_is_read(self, store: Store) -> None:
        store.put("a", [b"0123456789"])
        assert bytes(store.get("a", 3, 7)) == b"3456"
        assert bytes(store.get("a", 3)) == b"3456789"
        assert bytes(store.get("a", 0, 10)) == b"0123456789"
        assert bytes(store.get("a", 4, 4)) == bytes(store.get("a", 10)) == b""

    def test_a_byte_range_is_read_into_a_buffer(self, store: Store) -> None:
        store.put("a", [b"0123456789"])
        buffer = bytearray(b"........")
        found = store.get("a", 3, 7, into=memoryview(buffer)[2:6])
        assert buffer == b"..3456.."
        assert bytes(found) == b"3456"
        assert store.get("a", 2, 2, into=memoryview(bytearray())).nbytes == 0

    def test_a_buffer_of_another_item_type_is_filled(self, store: Store) -> None:
        numbers = array.array("d", [1.0, 2.0, 3.0])
        store.put("a", [memoryview(numbers)])
        target = array.array("d", [0.0, 0.0])
        store.get("a", 8, 24, into=memoryview(target))
        assert list(target) == [2.0, 3.0]

    @pytest.mark.parametrize("length", [3, 5])
    def test_a_buffer_of_another_length_is_refused(self, store: Store, length: int) -> None:
        store.put("a", [b"0123456789"])
        with pytest.raises(ValueError, match="4 bytes"):
            store.get("a", 3, 7, into=memoryview(bytearray(length)))

    @pytest.mark.parametrize(("start", "end"), [(-1, 3), (5, 4)])
    def test_what_is_no_range_is_refused(self, store: Store, start: int, end: int) -> None:
        store.put("a", [b"0123456789"])
        with pytest.raises(ValueError, match="range"):
            store.get("a", start, end)

    @pytest.mark.parametrize(("start", "end"), [(0, 11), (9, 11), (10, 11), (11, None), (0, 1 << 60)])
    def test_a_read_past_the_end_is_corruption_and_names_the_object(
        self, store: Store, start: int, end: int | None
    ) -> None:
        store.put("a/b", [b"0123456789"])
        with pytest.raises(CorruptionError, match="a/b") as caught:
            store.get("a/b", start, end)
        assert caught.value.key == "a/b"
        assert "10" in caught.value.found

    def test_a_missing_object_is_not_found_and_named(self, store: Store) -> None:
        store.put("a/b/c", [b"x"])
        store.put("file", [b"x"])
        for key in ("q", "a/q", "a/b", "a", "a/b/c0", "file/below"):
            with pytest.raises(NotFoundError) as caught:
                store.get(key)
            assert caught.value.key == key

    def test_the_same_put_again_changes_nothing(self, store: Store) -> None:
        content = _pattern(BIG)
        store.put("a", [content])
        store.put("a", [content[:77], content[77:]])
        assert store.get("a") == content

    @pytest.mark.parametrize("other", [b"", b"two!", b"one more", b"on"])
    def test_a_put_of_other_bytes_is_a_conflict_and_changes_nothing(self, store: Store, other: bytes) -> None:
        store.put("a/b", [b"one!"])
        with pytest.raises(ConflictError, match="a/b"):
            store.put("a/b", [other])
        assert bytes(store.get("a/b")) == b"one!"

    def test_a_large_put_that_differs_in_its_last_byte_is_a_conflict(self, store: Store) -> None:
        content = _pattern(BIG)
        store.put("a", [content])
        other = bytearray(content)
        other[-1] ^= 1
        with pytest.raises(ConflictError):
            store.put("a", [other])
        assert store.get("a") == content

    def test_put_if_absent_writes_once(self, store: Store) -> None:
        assert store.put_if_absent("a/b", [b"on", b"e"]) is True
        assert store.put_if_absent("a/b", [b"two"]) is False
        assert store.put_if_absent("a/b", [b"one"]) is False
        assert bytes(store.get("a/b")) == b"one"

    def test_put_if_absent_sees_what_put_wrote_and_the_reverse(self, store: Store) -> None:
        store.put("a", [b"one"])
        assert store.put_if_absent("a", [b"two"]) is False
        assert store.put_if_absent("b", [b"one"]) is True
        with pytest.raises(ConflictError):
            store.put("b", [b"two"])

    def test_of_concurrent_put_if_absent_exactly_one_succeeds(self, connect: Callable[[], Store]) -> None:
        racers = 8
        barrier = threading.Barrier(racers)
        stores = [connect() for _ in range(racers)]

        def race(racer: int, key: str) -> bool:
            barrier.wait()
            return stores[racer].put_if_absent(key, [b"racer ", str(racer).encode()])

        with ThreadPoolExecutor(racers) as pool:
            for round_ in range(5):
                key = f"race-{round_}/commit.json"
                won = list(pool.map(race, range(racers), [key] * racers))
                assert won.count(True) == 1
                assert bytes(stores[0].get(key)) == b"racer %d" % won.index(True)

    def test_of_concurrent_large_put_if_absent_exactly_one_succeeds(self, connect: Callable[[], Store]) -> None:
        racers = 3
        barrier = threading.Barrier(racers)
        stores = [connect() for _ in range(racers)]

        def race(racer: int) -> bool:
            barrier.wait()
            return stores[racer].put_if_absent("a/b", [bytes([racer]) * BIG])

        with ThreadPoolExecutor(racers) as pool:
            won = list(pool.map(race, range(racers)))
        assert won.count(True) == 1
        assert stores[0].get("a/b") == bytes([won.index(True)]) * BIG

    def test_concurrent_puts_of_the_same_bytes_all_succeed(self, connect: Callable[[], Store]) -> None:
        racers = 4
        barrier = threading.Barrier(racers)
        content = _pattern(70_001)

        def race(_: int) -> None:
            store = connect()
            barrier.wait()
            store.put("a/b", [content])

        with ThreadPoolExecutor(racers) as pool:
            list(pool.map(race, range(racers)))
        assert connect().get("a/b") == content

    def test_another_handle_sees_a_write_that_returned(self, connect: Callable[[], Store]) -> None:
        writer, reader = connect(), connect()
        assert list(reader.list()) == []
        writer.put("a/b", [b"one"])
        assert bytes(reader.get("a/b")) == b"one"
        assert [one.key for one in reader.list()] == ["a/b"]
        writer.delete(["a/b"])
        assert list(reader.list()) == []

    def test_a_listing_gives_keys_in_ascending_order_with_sizes(self, store: Store) -> None:
        # "-" and "." sort before "/", digits and letters after it.
        keys = ["a-b/c", "a.b", "a.b.c/d", "a/b-c", "a/b.c", "a/b/c/d", "a/b0", "a0", "aB", "a_b", "ab/c", "b", "B"]
        for size, key in enumerate(keys):
            store.put(key, [b"x" * size])
        expected = sorted((key, size) for size, key in enumerate(keys))
        assert [(one.key, one.size) for one in store.list()] == expected

    def test_a_listing_begins_after_any_text(self, store: Store) -> None:
        keys = sorted(["a-b/c", "a.b", "a/b/c", "a/b/d", "a/c", "a0", "b"])
        for key in keys:
            store.put(key, [b"x"])
        for after in [*keys, "", "a", "a/", "a/b", "a/b/", "a/b/cc", "a/b/z", "a/b0", "a/z", "z"]:
            assert [one.key for one in store.list(after=after)] == [key for key in keys if key > after], after
            assert [one.key for one in store.list("a/", after)] == [
                key for key in keys if key > after and key.startswith("a/")
            ], after

    def test_a_prefix_is_text_and_not_a_folder(self, store: Store) -> None:
        keys = sorted(["m/00000001.json", "m/00000001.base.json", "m/00000002.json", "mm/1", "data/1"])
        for key in keys:
            store.put(key, [b"x"])
        for prefix in ["", "m", "m/", "m/0000000", "m/00000001", keys[3], f"{keys[3]}/", "mm", "q", "m/q/"]:
            assert [one.key for one in store.list(prefix)] == [key for key in keys if key.startswith(prefix)], prefix

    @pytest.mark.parametrize("prefix", ["/", "..", "../", "a/../", "./", ".", "//", ".tmp-"])
    def test_a_prefix_that_no_key_can_have_lists_nothing(self, store: Store, prefix: str) -> None:
        store.put("a/b", [b"x"])
        assert list(store.list(prefix)) == []

    def test_a_long_listing_is_complete(self, store: Store) -> None:
        keys = [f"m/{number:08d}.json" for number in range(self.many)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, [key.encode()]), keys))
        assert [one.key for one in store.list("m/")] == keys
        assert [one.key for one in store.list("m/", after=keys[-3])] == keys[-2:]

    def test_a_deleted_object_is_gone_and_its_neighbours_are_not(self, store: Store) -> None:
        for key in ("a/b/c", "a/b/d", "a/e"):
            store.put(key, [b"x"])
        store.delete(["a/b/c"])
        with pytest.raises(NotFoundError):
            store.get("a/b/c")
        assert [one.key for one in store.list()] == ["a/b/d", "a/e"]
        store.delete(iter(["a/b/d", "a/e"]))
        assert list(store.list()) == []

    def test_deleting_what_does_not_exist_is_no_error(self, store: Store) -> None:
        store.delete(["q", "q/r"])
        store.put("a/b", [b"x"])
        store.delete(["a/q", "a", "a/b/c", "a/b", "a/b"])
        store.delete([])
        assert list(store.list()) == []

    def test_a_deleted_key_can_be_written_again(self, store: Store) -> None:
        store.put("a/b/c", [b"one"])
        store.delete(["a/b/c"])
        assert store.put_if_absent("a/b/c", [b"two"]) is True
        assert bytes(store.get("a/b/c")) == b"two"

    def test_writers_and_deleters_of_one_prefix_do_not_disturb_each_other(self, connect: Callable[[], Store]) -> None:
        def write_and_delete(worker: int) -> None:
            store = connect()
            for turn in range(15):
                key = f"data/shared/{worker}-{turn}"
                store.put(key, [key.encode()])
                assert bytes(store.get(key)) == key.encode()
                store.delete([key])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write_and_delete, range(4)))
        assert list(connect().list()) == []

    @pytest.mark.parametrize("key", ["a", "A-b_c.d", "0/1/2", "x" * 200, "-", "_", "a..b", "a./b."])
    def test_every_character_of_keys_works(self, store: Store, key: str) -> None:
        store.put(key, [b"x"])
        assert bytes(store.get(key)) == b"x"
        assert [one.key for one in store.list()] == [key]
        store.delete([key])
        assert list(store.list()) == []

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_a_bad_key_is_refused_by_every_operation(self, store: Store, key: str) -> None:
        store.put("a/b", [b"x"])
        for operation in (
            lambda: store.put(key, [b"y"]),
            lambda: store.put_if_absent(key, [b"y"]),
            lambda: store.get(key),
            lambda: store.delete([key]),
        ):
            with pytest.raises(StorageError, match="key"):
                operation()
        assert [one.key for one in store.list()] == ["a/b"]

    def test_a_store_has_a_name(self, store: Store) -> None:
        assert store.url

    def test_a_closed_store_refuses_everything(self, connect: Callable[[], Store]) -> None:
        store = connect()
        store.put("a", [b"x"])
        store.close()
        store.close()
        for operation in (
            lambda: store.put("b", [b"y"]),
            lambda: store.put_if_absent("b", [b"y"]),
            lambda: store.get("a"),
            lambda: list(store.list()),
            lambda: store.delete(["a"]),
        ):
            with pytest.raises(StorageError, match="closed"):
                operation()
        assert [one.key for one in connect().list()] == ["a"]


def _pattern(size: int) -> bytes:
    """Bytes whose period divides no block size, so that a block out of place shows."""
    period = bytes(range(251))
    return (period * (size // len(period) + 1))[:size]
