"""A store below a prefix of an S3 bucket, or of a service that speaks the same protocol, through boto3.

It must not know what the bytes mean, and repeats nothing but the parts of a large transfer.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from typing import Any

import numpy as np
from botocore.exceptions import ClientError

from incremental_ckpt.errors import ConflictError, CorruptionError, NotFoundError, StorageError
from incremental_ckpt.storage.access import Access
from incremental_ckpt.storage.arguments import byte_views, check_range, new_or_given, range_end
from incremental_ckpt.storage.base import Buffer, StoredObject
from incremental_ckpt.storage.parallel import run_all
from incremental_ckpt.storage.retry import NO_RETRY, Retry
from incremental_ckpt.storage.s3_client import Location, connect
from incremental_ckpt.storage.s3_errors import (
    CHANGED,
    EXISTS,
    FAILURES,
    MISSING,
    PAST_THE_END,
    UPLOAD_GONE,
    code_of,
    storage_error,
)
from incremental_ckpt.storage.slices import Concatenation, Upload, checksum

MOST_PARTS = 10_000
LEAST_PART_BYTES = 5 << 20
_MIB = 1 << 20
_READ_BYTES = 1 << 20
_COMPARE_BYTES = 32 << 20
_DELETED_AT_ONCE = 1000
_NEVER: frozenset[str] = frozenset()

Answer = dict[str, Any]


def part_size(size: int, least: int) -> int:
    """Bytes of the parts of an object of ``size`` bytes: ``least``, or as many MiB as make 10,000 parts suffice."""
    return max(least, -(-size // (MOST_PARTS * _MIB)) * _MIB)


class S3Store:
    """The objects are those below a prefix of a bucket, their keys what follows it.

    Nothing is overwritten: every write asks the service to refuse it if the key exists (``If-None-Match: *``).
    Objects of more than ``part_bytes`` are sent and read in parts, ``threads`` at a time. What is sent are views of the
    caller's buffers.
    """

    def __init__(
        self,
        location: Location | str,
        *,
        read_only: bool = False,
        retry: Retry = NO_RETRY,
        part_bytes: int = 8 * _MIB,
        threads: int = 8,
        connect_timeout: float = 10.0,
        read_timeout: float = 60.0,
        request_timeout: float = 300.0,
        session: Any = None,
    ) -> None:
        """
        Args:
            location: where, or its URL: ``s3://BUCKET/PREFIX?endpoint_url=…&region=…&profile=…``.
            retry: for the parts of a large object; what else failed is the caller's to repeat (RetryStore).
            part_bytes: at least 5 MiB.
            connect_timeout: seconds until a connection must be there.
            read_timeout: seconds without a byte after which a request has failed.
            request_timeout: seconds after which a request has failed, even if bytes still trickle.
            session: a boto3.Session to use instead of one for the profile.

        Raises:
            StorageError: the prefix cannot be listed, or (unless ``read_only``) not written, or there is no such place.
        """
        if part_bytes < LEAST_PART_BYTES or threads < 1:
            raise ValueError(f"part_bytes must be at least {LEAST_PART_BYTES} and threads 1: {part_bytes}, {threads}")
        self._location = Location.parse(location) if isinstance(location, str) else location
        self._root = f"{self._location.prefix}/" if self._location.prefix else ""
        self._access = Access(self._location.url, read_only)
        self._retry = retry
        self._part_bytes = part_bytes
        self._threads = threads
        self._request_timeout = request_timeout
        self._excludes = False
        self._client = connect(self._location, connect_timeout, read_timeout, 4 * threads, session)
        self._check_place()

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def read_only(self) -> bool:
        return self._access.read_only

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._access.check_writable("write", key)
        content = Concatenation(byte_views(parts))
        if not self._create(key, content) and not self._holds(key, content):
            raise ConflictError(
                f"cannot write {key} to {self.url}: it exists with other bytes, and objects are never overwritten. "
                "Another job writes to this store: stop one of them"
            )

    def put_if_absent(self, key: str, parts: Sequence[Buffer]) -> bool:
        """Write like ``put`` unless the key exists.

        A lost answer is a retryable StorageError: the object may be there then, and who tries again gets False.
        """
        self._access.check_writable("write", key)
        content = Concatenation(byte_views(parts))
        if self._excludes:
            return self._create(key, content)
        if self._size(key) is not None or not self._create(key, content):
            return False
        self._check_exclusion(key, content)
        return True

    def get(self, key: str, start: int = 0, end: int | None = None, into: memoryview | None = None) -> memoryview:
        self._access.check_key(key)
        check_range(key, start, end)
        step = self._part_bytes
        first = None if start == end else self._open(key, start, min(start + step, end or start + step))
        if first is None:
            return new_or_given(key, self._length(key, start, end), into)
        try:
            length = range_end(key, _total(key, first), start, end) - start
            target = new_or_given(key, length, into)
        except BaseException:
            first["Body"].close()
            raise
        readers = (
            self._reader(key, start + at, target[at : at + step], first, opened=at == 0)
            for at in range(0, length, step)
        )
        run_all(readers, min(self._threads, -(-length // step)))
        return target

    def list(self, prefix: str = "", after: str = "") -> Iterator[StoredObject]:
        self._access.check_open()
        return self._list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        self._access.check_open()
        remaining = iter(keys)
        while batch := [*islice(remaining, _DELETED_AT_ONCE)]:
            for key in batch:
                self._access.check_writable("delete", key)
            self._delete(batch)

    def close(self) -> None:
        if not self._access.closed:
            self._client.close()
        self._access.closed = True

    # Writing.

    def _create(self, key: str, content: Concatenation) -> bool:
        """False if the key exists."""
        if content.size <= self._part_bytes:
            body = self._body(content, 0, content.size)
            return self._ask(f"write {key} to", "put_object", EXISTS, key, IfNoneMatch="*", **body) is not None
        # Asked first, so that many bytes are not sent in vain.
        return self._size(key) is None and self._create_in_parts(key, content)

    def _create_in_parts(self, key: str, content: Concatenation) -> bool:
        step = part_size(content.size, self._part_bytes)
        count = -(-content.size // step)
        begun = self._told(f"write {key} to", "create_multipart_upload", key, ChecksumAlgorithm="CRC32")
        upload = begun["UploadId"]
        parts: list[Answer] = [{} for _ in range(count)]

        def send(number: int) -> None:
            body = self._body(content, number * step, min((number + 1) * step, content.size))
            action = f"write part {number + 1} of {count} of {key} to"
            sent = self._told(action, "upload_part", key, UploadId=upload, PartNumber=number + 1, **body)
            crc = body["ChecksumCRC32"]
            parts[number] = {"PartNumber": number + 1, "ETag": sent["ETag"], "ChecksumCRC32": crc}

        def sender(number: int) -> Callable[[], None]:
            return lambda: self._retry.call(lambda: send(number))

        completed = False
        try:
            run_all(map(sender, range(count)), min(self._threads, count))
            completed = self._complete(key, upload, parts, content.size)
        finally:
            if not completed:
                # Nothing of it may take effect later, and the first error is the one to tell.
                with suppress(StorageError):
                    self._ask(f"abort {key} in", "abort_multipart_upload", UPLOAD_GONE, key, UploadId=upload)
        return completed

    def _complete(self, key: str, upload: str, parts: Sequence[Answer], size: int) -> bool:
        """False if the key exists, perhaps because an earlier try took effect and its answer was lost."""
        answer = self._retry.call(
            lambda: self._ask(
                f"write {key} to",
                "complete_multipart_upload",
                EXISTS | UPLOAD_GONE,
                key,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
                MpuObjectSize=size,
                IfNoneMatch="*",
            )
        )
        if answer is None and self._size(key) is None:
            raise StorageError(
                f"cannot write {key} to {self.url}: the service dropped the upload before it was complete",
                retryable=True,
            )
        return answer is not None

    def _body(self, content: Concatenation, start: int, end: int) -> Answer:
        """The parameters that carry bytes: S3 compares what arrives with their checksum."""
        views = content.between(start, end)
        body = Upload(views, self._deadline()) if views else b""
        return {"Body": body, "ContentLength": end - start, "ChecksumCRC32": _in_base64(checksum(views))}

    def _holds(self, key: str, content: Concatenation) -> bool:
        """Whether the object's bytes are the content."""
        if self._size(key) != content.size:
            return False
        buffer = np.empty(min(content.size, _COMPARE_BYTES), np.uint8).data
        for start in range(0, content.size, _COMPARE_BYTES):
            end = min(start + _COMPARE_BYTES, content.size)
            found = np.frombuffer(self.get(key, start, end, buffer[: end - start]), np.uint8)
            for view in content.between(start, end):
                if not np.array_equal(found[: view.nbytes], np.frombuffer(view, np.uint8)):
                    return False
                found = found[view.nbytes :]
        return True

    # Reading, listing and removing.

    def _size(self, key: str) -> int | None:
        """Bytes of the object; None if there is none."""
        answer = self._ask(f"look up {key} in", "head_object", MISSING, key)
        return None if answer is None else int(answer["ContentLength"])

    def _length(self, key: str, start: int, end: int | None) -> int:
        """Bytes in the range, by asking for the size. Raises what ``get`` raises for it."""
        size = self._size(key)
        if size is None:
            raise self._not_found(key)
        return range_end(key, size, start, end) - start

    def _open(self, key: str, start: int, end: int, **condition: str) -> Answer | None:
        """A range and its ETag; None if the object ends at or before ``start``, or is not that of the condition."""
        wanted, unless = f"bytes={start}-{end - 1}", PAST_THE_END | CHANGED
        try:
            return self._ask(f"read {key} from", "get_object", unless, key, Range=wanted, **condition)
        except StorageError as error:
            if isinstance(error.__cause__, ClientError) and code_of(error.__cause__) in MISSING:
                raise self._not_found(key) from None
            raise

    def _reader(self, key: str, start: int, target: memoryview, first: Answer, *, opened: bool) -> Callable[[], None]:
        """Reads a part of the object that ``first`` came from; ``opened``: ``first`` is the answer to its first try."""

        def read() -> None:
            nonlocal opened
            answer = first if opened else self._open(key, start, start + target.nbytes, IfMatch=first["ETag"])
            opened = False
            if answer is None:
                raise CorruptionError(
                    f"{key} in {self.url} changed while it was read: somebody overwrites objects", key=key
                )
            self._fill(key, target, answer["Body"])

        return lambda: self._retry.call(read)

    def _fill(self, key: str, target: memoryview, body: Any) -> None:
        check = self._deadline()
        done = 0
        with closing(body):
            try:
                while done < target.nbytes:
                    check()
                    count = body.readinto(target[done : done + _READ_BYTES])
                    if not count:
                        raise ConnectionError(f"the answer broke off after {done} of {target.nbytes} bytes")
                    done += count
            except FAILURES as error:
                raise storage_error(f"read {key} from {self.url}", error) from error

    def _list(self, prefix: str, after: str) -> Iterator[StoredObject]:
        more = True
        while more:
            begin = {"StartAfter": self._root + after} if after else {}
            page = self._told(f"list {prefix!r} in", "list_objects_v2", Prefix=self._root + prefix, **begin)
            for one in page.get("Contents", ()):
                after = one["Key"].removeprefix(self._root)
                # Consoles make empty objects that stand for folders; names with a leading dot are hidden everywhere.
                if after and not after.endswith("/") and not any(name.startswith(".") for name in after.split("/")):
                    yield StoredObject(after, int(one["Size"]))
            more = page.get("IsTruncated", False)

    def _delete(self, keys: Sequence[str]) -> None:
        objects = [{"Key": self._root + key} for key in keys]
        answer = self._told("delete objects in", "delete_objects", Delete={"Objects": objects, "Quiet": True})
        for failure in answer.get("Errors", ()):
            if failure.get("Code") not in MISSING:
                key = str(failure.get("Key", "")).removeprefix(self._root)
                raise storage_error(f"delete {key} in {self.url}", ClientError({"Error": failure}, "DeleteObjects"))

    # Asking the service.

    def _ask(
        self, action: str, operation: str, unless: frozenset[str] = _NEVER, key: str | None = None, **parameters: Any
    ) -> Answer | None:
        """One request; None if the service answers with a code of ``unless``."""
        if key is not None:
            parameters["Key"] = self._root + key
        try:
            answer: Answer = getattr(self._client, operation)(Bucket=self._location.bucket, **parameters)
        except FAILURES as error:
            if code_of(error) in unless:
                return None
            raise storage_error(f"{action} {self.url}", error) from error
        return answer

    def _told(self, action: str, operation: str, key: str | None = None, **parameters: Any) -> Answer:
        answer = self._ask(action, operation, _NEVER, key, **parameters)
        assert answer is not None
        return answer

    def _deadline(self) -> Callable[[], None]:
        """To be called while bytes move; raises TimeoutError when that takes longer than a request may."""
        end = time.monotonic() + self._request_timeout

        def check() -> None:
            if time.monotonic() > end:
                raise TimeoutError(f"the request took longer than {self._request_timeout:g} s")

        return check

    # What a caller did wrong, and what the service does not offer.

    def _check_place(self) -> None:
        self._retry.call(lambda: self._probe("list", "list_objects_v2", Prefix=self._root, MaxKeys=1))
        if not self.read_only:
            # Begins an upload and drops it: writes nothing, and tells whether we may.
            key = self._root + ".probe"
            begun = self._retry.call(lambda: self._probe("write to", "create_multipart_upload", Key=key))
            with suppress(StorageError):
                self._told("abort in", "abort_multipart_upload", Key=key, UploadId=begun["UploadId"])

    def _probe(self, action: str, operation: str, **parameters: Any) -> Answer:
        try:
            return self._told(action, operation, **parameters)
        except StorageError as error:
            # Where nobody answers, the first guess is a wrong endpoint: it is told at once.
            error.retryable = error.retryable and isinstance(error.__cause__, ClientError)
            raise

    def _check_exclusion(self, key: str, content: Concatenation) -> None:
        """Write the same bytes again, once: a service that takes them would overwrite another job's as well."""
        if content.size > self._part_bytes:
            return
        try:
            overwritten = self._create(key, content)
        except StorageError:
            return  # no answer: the next write asks again
        if overwritten:
            raise StorageError(
                f"cannot use {self.url}: the service ignores If-None-Match, so that two jobs could overwrite each "
                "other's checkpoints. See docs/stores.md for what a service must offer"
            )
        self._excludes = True

    def _not_found(self, key: str) -> NotFoundError:
        return NotFoundError(f"no object {key} in {self.url}", key=key)


def _in_base64(crc: int) -> str:
    return b64encode(crc.to_bytes(4, "big")).decode()


def _total(key: str, answer: Answer) -> int:
    """The size of the whole object of which ``answer`` is a range."""
    total = str(answer.get("ContentRange", "")).rpartition("/")[2]
    if not total.isdecimal():
        raise StorageError(f"cannot read {key}: the service ignores ranges. See docs/stores.md for what it must offer")
    return int(total)
