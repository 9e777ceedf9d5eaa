"""Parts of large objects: cut without copying, moved in several threads."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Callable
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from incremental_ckpt.storage.parallel import run_all
from incremental_ckpt.storage.slices import Concatenation, Upload, checksum

PIECES = st.lists(st.binary(min_size=1, max_size=20), max_size=8)


@given(PIECES, st.data())
def test_a_range_of_views_is_that_of_their_concatenation(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    views = Concatenation([memoryview(piece) for piece in pieces]).between(start, end)
    assert b"".join(views) == whole[start:end]
    assert all(view.nbytes for view in views)
    assert checksum(views) == crc32(whole[start:end])


@given(PIECES, st.integers(1, 30))
def test_an_upload_reads_as_a_file(pieces: list[bytes], size: int) -> None:
    whole = b"".join(pieces)
    upload, like = Upload([memoryview(piece) for piece in pieces]), io.BytesIO(whole)
    assert len(upload) == len(whole)
    while chunk := like.read(size):
        assert upload.read(size) == chunk
        assert upload.tell() == like.tell()
    assert upload.read(size) == b""
    assert upload.seek(0, io.SEEK_END) == len(whole)
    assert upload.seek(0) == 0
    assert upload.read() == whole


def test_what_lies_in_one_buffer_is_sent_without_a_copy() -> None:
    source = bytearray(100)
    upload = Upload([memoryview(source)[:60], memoryview(source)[60:]])
    upload.seek(10)
    read = upload.read(20)
    source[10] = 7
    assert read[0] == 7


def test_a_deadline_breaks_an_upload_off() -> None:
    def late() -> None:
        raise TimeoutError("too late")

    with pytest.raises(TimeoutError, match="too late"):
        Upload([memoryview(b"x")], late).read(1)


class TestRunAll:
    def test_all_calls_are_made_in_several_threads_at_once(self) -> None:
        together = threading.Barrier(4, timeout=60)
        made: list[int] = []

        def call(number: int) -> Callable[[], None]:
            def run() -> None:
                together.wait()
                made.append(number)

            return run

        run_all(map(call, range(8)), 4)
        assert sorted(made) == list(range(8))

    def test_the_first_failure_is_raised_after_all_have_ended_and_no_call_begins_after_it(self) -> None:
        begun: list[int] = []
        both, failed, ended = threading.Barrier(2, timeout=60), threading.Event(), threading.Event()

        def first() -> None:
            both.wait()
            failed.set()
            raise KeyError("first")

        def second() -> None:
            both.wait()
            failed.wait()
            ended.set()
            raise KeyError("second")

        def later(number: int) -> Callable[[], None]:
            return lambda: begun.append(number)

        with pytest.raises(KeyError, match="first"):
            run_all([first, second, *map(later, range(100))], 2)
        assert ended.is_set()
        assert begun == []

    def test_one_thread_is_the_callers(self) -> None:
        threads: list[threading.Thread] = []
        run_all([lambda: threads.append(threading.current_thread())] * 3, 1)
        assert threads == [threading.current_thread()] * 3

    def test_nothing_to_do_is_done(self) -> None:
        run_all([], 0)

    def test_it_still_works_while_the_interpreter_exits(self) -> None:
        script = """
import atexit, threading
from incremental_ckpt.storage.parallel import run_all
both = threading.Barrier(2, timeout=60)
atexit.register(lambda: (run_all([both.wait, both.wait], 2), print("done")))
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("done\n", "")
