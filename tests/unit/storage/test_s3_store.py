"""What an S3 store does beyond the conformance tests: parts, faults on the way, time-outs, bad input."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moto.s3.models import s3_backends
from s3_server import (
    BUCKET,
    PAGE,
    Answer,
    Cut,
    Disturbance,
    DroppedConnectionError,
    Proceed,
    Request,
    S3Server,
    refusal,
)

from incremental_ckpt.errors import ConflictError, CorruptionError, NotFoundError, StorageError
from incremental_ckpt.storage import open_store
from incremental_ckpt.storage.retry import Retry, RetryStore
from incremental_ckpt.storage.s3 import LEAST_PART_BYTES, MOST_PARTS, S3Store, part_size
from incremental_ckpt.storage.s3_client import Location

PART = LEAST_PART_BYTES
LARGE = bytes(range(251)) * ((3 * PART + 17) // 251 + 1)
IMPATIENT = Retry(first=0.0, within=60.0)
Connect = Callable[..., S3Store]


@pytest.fixture
def prefix() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def connect(s3_server: S3Server, aws: boto3.Session, prefix: str) -> Connect:
    def connect(**options: Any) -> S3Store:
        location = Location(BUCKET, prefix, s3_server.url, "us-east-1")
        return S3Store(location, **{"part_bytes": PART, "session": aws, **options})

    return connect


@pytest.fixture
def store(connect: Connect) -> S3Store:
    return connect()


def on(operation: str, answer: Callable[[Request, Proceed], Answer], times: int = 1) -> Disturbance:
    """Disturbs the first ``times`` requests of an operation."""
    lock = threading.Lock()
    left = times

    def disturb(request: Request, proceed: Proceed) -> Answer:
        nonlocal left
        with lock:
            mine = request.operation == operation and left > 0
            left -= mine
        return answer(request, proceed) if mine else proceed(request)

    return disturb


def answering(status: int, code: str, **headers: str) -> Callable[[Request, Proceed], Answer]:
    return lambda request, proceed: refusal(status, code, headers=headers)


def lose_the_answer(request: Request, proceed: Proceed) -> Answer:
    proceed(request)
    raise DroppedConnectionError


def drop_the_request(request: Request, proceed: Proceed) -> Answer:
    raise DroppedConnectionError


def damage(request: Request, proceed: Proceed) -> Answer:
    return proceed(replace(request, body=bytes([request.body[0] ^ 1]) + request.body[1:]))


def unfinished_uploads(store: S3Store) -> Sequence[Any]:
    return [
        one
        for one in store._client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
        if one["Key"].startswith(store._root)
    ]


class TestParts:
    @given(st.integers(0, 50 << 40), st.integers(LEAST_PART_BYTES, 1 << 30))
    def test_no_object_needs_more_than_ten_thousand_parts(self, size: int, least: int) -> None:
        step = part_size(size, least)
        assert step >= least
        assert -(-size // step) <= MOST_PARTS
        assert step == least or step - (1 << 20) < size / MOST_PARTS

    def test_a_large_object_is_sent_and_read_in_parts(self, store: S3Store, s3_server: S3Server) -> None:
        since = len(s3_server.requests)
        store.put("a", [LARGE])
        sent = s3_server.operations(since)
        assert sent.count("UploadPart") == 4
        assert sent.count("PutObject") == 0
        since = len(s3_server.requests)
        assert store.get("a") == LARGE
        assert s3_server.operations(since) == ["GetObject"] * 4

    def test_of_a_large_object_that_exists_no_byte_is_sent_again(self, store: S3Store, s3_server: S3Server) -> None:
        store.put("a", [LARGE])
        since = len(s3_server.requests)
        store.put("a", [LARGE])
        with pytest.raises(ConflictError):
            store.put("a", [LARGE[:-1]])
        assert store.put_if_absent("a", [LARGE]) is False
        assert "UploadPart" not in s3_server.operations(since)

    def test_a_part_that_fails_is_repeated_alone(self, connect: Connect, s3_server: S3Server) -> None:
        store = connect(retry=IMPATIENT)
        since = len(s3_server.requests)
        with s3_server.disturbed(on("UploadPart", answering(503, "SlowDown"), times=2)):
            store.put("a", [LARGE])
        assert s3_server.operations(since).count("UploadPart") == 6
        since = len(s3_server.requests)
        with s3_server.disturbed(on("GetObject", cut(1), times=2)):  # less than the last part, which is short
            assert store.get("a") == LARGE
        assert s3_server.operations(since).count("GetObject") == 6

    def test_a_failed_upload_is_aborted_and_its_first_error_kept(self, store: S3Store, s3_server: S3Server) -> None:
        with (
            s3_server.disturbed(
                on("UploadPart", answering(403, "AccessDenied")),
                on("AbortMultipartUpload", lambda request, proceed: (proceed(request), refusal(500, "Boom"))[1]),
            ),
            pytest.raises(StorageError, match="AccessDenied") as caught,
        ):
            store.put("a/b", [LARGE])
        assert not caught.value.retryable
        assert "a/b" in str(caught.value)
        assert unfinished_uploads(store) == []
        assert list(store.list()) == []

    def test_an_upload_whose_last_step_fails_is_aborted(self, store: S3Store, s3_server: S3Server) -> None:
        with (
            s3_server.disturbed(on("CompleteMultipartUpload", answering(409, "ConditionalRequestConflict"))),
            pytest.raises(StorageError, match="ConditionalRequestConflict") as caught,
        ):
            store.put("a", [LARGE])
        assert caught.value.retryable
        assert unfinished_uploads(store) == []

    def test_an_upload_that_another_writer_overtakes_is_aborted(self, store: S3Store, s3_server: S3Server) -> None:
        def overtake(request: Request, proceed: Proceed) -> Answer:
            s3_backends_put(store, "a", b"theirs")
            return proceed(request)

        with s3_server.disturbed(on("CompleteMultipartUpload", overtake)):
            assert store.put_if_absent("a", [LARGE]) is False
        assert bytes(store.get("a")) == b"theirs"
        assert unfinished_uploads(store) == []

    def test_an_upload_that_the_service_dropped_is_begun_again(self, connect: Connect, s3_server: S3Server) -> None:
        store = RetryStore(connect(), IMPATIENT)
        with s3_server.disturbed(on("CompleteMultipartUpload", answering(404, "NoSuchUpload"))):
            store.put("a", [LARGE])
        assert store.get("a") == LARGE

    def test_an_object_that_is_replaced_while_it_is_read_is_corrupt(self, store: S3Store, s3_server: S3Server) -> None:
        store.put("a", [LARGE])

        def replaced(request: Request, proceed: Proceed) -> Answer:
            answer = proceed(request)
            s3_backends_put(store, "a", bytes(len(LARGE)))
            return answer

        with s3_server.disturbed(on("GetObject", replaced)), pytest.raises(CorruptionError, match="changed") as caught:
            store.get("a")
        assert caught.value.key == "a"

    @pytest.mark.parametrize(("part_bytes", "threads"), [(PART - 1, 8), (PART, 0)])
    def test_parts_that_s3_would_refuse_are_refused(self, connect: Connect, part_bytes: int, threads: int) -> None:
        with pytest.raises(ValueError, match="part_bytes"):
            connect(part_bytes=part_bytes, threads=threads)


def cut(keep: int) -> Callable[[Request, Proceed], Answer]:
    def disturb(request: Request, proceed: Proceed) -> Answer:
        answer = proceed(request)
        assert not isinstance(answer, Cut)
        return Cut(answer, keep)

    return disturb


def s3_backends_put(store: S3Store, key: str, value: bytes) -> None:
    """Writes behind the back of the server, without its conditions."""
    s3_backends["123456789012"]["aws"].put_object(BUCKET, store._root + key, value)


class TestFaultsOnTheWay:
    @pytest.mark.parametrize(
        "fault",
        [
            answering(503, "SlowDown"),
            answering(500, "InternalError"),
            answering(409, "ConditionalRequestConflict"),
            answering(400, "RequestTimeout"),
            answering(429, "TooManyRequests"),
            damage,
            drop_the_request,
            lose_the_answer,
        ],
        ids=["503", "500", "409", "400", "429", "damaged", "dropped", "answer lost"],
    )
    def test_a_write_is_not_repeated_by_the_store_but_by_its_wrapper(
        self, store: S3Store, s3_server: S3Server, fault: Callable[[Request, Proceed], Answer]
    ) -> None:
        since = len(s3_server.requests)
        with (
            s3_server.disturbed(on("PutObject", fault)),
            pytest.raises(StorageError, match="write a/b to") as bare,
        ):
            store.put("a/b", [b"1"])
        assert bare.value.retryable
        assert s3_server.operations(since) == ["PutObject"]
        with s3_server.disturbed(on("PutObject", fault, times=2)):
            RetryStore(store, IMPATIENT).put("a/c", [b"2"])
        assert bytes(store.get("a/c")) == b"2"

    @pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
    def test_a_put_whose_answer_was_lost_is_no_conflict(
        self, connect: Connect, s3_server: S3Server, content: bytes
    ) -> None:
        store = RetryStore(connect(retry=IMPATIENT), IMPATIENT)
        with s3_server.disturbed(on("PutObject", lose_the_answer), on("CompleteMultipartUpload", lose_the_answer)):
            store.put("a", [content])
        assert store.get("a") == content

    @pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
    def test_a_put_if_absent_whose_answer_was_lost_finds_its_own_bytes(
        self, connect: Connect, s3_server: S3Server, content: bytes
    ) -> None:
        store = RetryStore(connect(retry=IMPATIENT), IMPATIENT)
        with s3_server.disturbed(on("PutObject", lose_the_answer), on("CompleteMultipartUpload", lose_the_answer)):
            assert store.put_if_absent("a", [content]) is False
        assert store.get("a") == content

    def test_bytes_damaged_on_the_way_are_never_stored(self, store: S3Store, s3_server: S3Server) -> None:
        for operation, content in (("PutObject", b"small"), ("UploadPart", LARGE)):
            with (
                s3_server.disturbed(on(operation, damage)),
                pytest.raises(StorageError, match="BadDigest") as caught,
            ):
                store.put("a", [content])
            assert caught.value.retryable
        assert list(store.list()) == []

    def test_a_read_that_breaks_off_is_repeated(self, store: S3Store, s3_server: S3Server) -> None:
        content = LARGE[:100_000]
        store.put("a", [content])
        with (
            s3_server.disturbed(on("GetObject", cut(70_000))),
            pytest.raises(StorageError, match="read a from") as bare,
        ):
            store.get("a")
        assert bare.value.retryable
        with s3_server.disturbed(on("GetObject", cut(70_000), times=3)):
            assert RetryStore(store, IMPATIENT).get("a") == content

    def test_a_page_of_a_listing_that_fails_is_asked_for_again(self, store: S3Store, s3_server: S3Server) -> None:
        seed(store, 2 * PAGE + 1)
        with s3_server.disturbed(on("ListObjectsV2", answering(503, "SlowDown"), times=2)):
            assert len([*RetryStore(store, IMPATIENT).list()]) == 2 * PAGE + 1

    def test_a_delete_that_fails_for_one_key_is_an_error(self, store: S3Store, s3_server: S3Server) -> None:
        def refuse_one(request: Request, proceed: Proceed) -> Answer:
            answer = refusal(200, "")
            answer.set_data(
                f"<DeleteResult><Error><Key>{store._root}a/b</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
                "</DeleteResult>"
            )
            return answer

        with (
            s3_server.disturbed(on("DeleteObjects", refuse_one)),
            pytest.raises(StorageError, match=r"delete a/b in s3://.*AccessDenied") as caught,
        ):
            store.delete(["a/b", "c"])
        assert not caught.value.retryable

    def test_a_missing_bucket_is_not_a_missing_object(self, store: S3Store, s3_server: S3Server) -> None:
        with (
            s3_server.disturbed(on("GetObject", answering(404, "NoSuchBucket"))),
            pytest.raises(StorageError, match="NoSuchBucket"),
        ):
            store.get("a")
        with pytest.raises(NotFoundError):
            store.get("a")

    def test_a_service_that_ignores_conditions_is_found_out_before_anything_is_lost(
        self, store: S3Store, s3_server: S3Server
    ) -> None:
        def ignore(request: Request, proceed: Proceed) -> Answer:
            return proceed(replace(request, environ={k: v for k, v in request.environ.items() if "NONE" not in k}))

        s3_backends_put(store, "taken", b"theirs")
        with s3_server.disturbed(ignore):
            assert store.put_if_absent("taken", [b"ours"]) is False
            with pytest.raises(StorageError, match="ignores If-None-Match"):
                store.put_if_absent("free", [b"ours"])
        assert bytes(store.get("taken")) == b"theirs"

    def test_conditions_are_tried_once(self, store: S3Store, s3_server: S3Server) -> None:
        assert store.put_if_absent("a", [b"1"]) is True
        since = len(s3_server.requests)
        assert store.put_if_absent("b", [b"1"]) is True
        assert s3_server.operations(since) == ["PutObject"]


class TestTimeouts:
    @pytest.fixture
    def stalled(self) -> Any:
        release = threading.Event()

        def stall(request: Request, proceed: Proceed) -> Answer:
            release.wait(60)
            raise DroppedConnectionError

        yield stall
        release.set()

    @pytest.mark.parametrize("operation", ["PutObject", "GetObject"])
    def test_a_request_without_an_answer_fails(
        self, connect: Connect, s3_server: S3Server, stalled: Any, operation: str
    ) -> None:
        store = connect(read_timeout=0.2)
        store.put("a", [b"1"])
        with s3_server.disturbed(on(operation, stalled)), pytest.raises(StorageError, match=r"(?i)time") as caught:
            if operation == "PutObject":
                store.put("b", [b"1"])
            else:
                store.get("a")
        assert caught.value.retryable

    def test_a_request_whose_bytes_trickle_fails_too(self, connect: Connect) -> None:
        connect().put("a", [LARGE[:100_000]])
        hasty = connect(request_timeout=0.0)
        with pytest.raises(StorageError, match="longer than 0 s") as caught:
            hasty.get("a")
        assert caught.value.retryable
        with pytest.raises(StorageError, match="longer than 0 s") as caught:
            hasty.put("b", [LARGE[:100_000]])
        assert caught.value.retryable


def seed(store: S3Store, count: int) -> Sequence[str]:
    keys = [f"m/{number:08d}.json" for number in range(count)]
    for key in keys:
        s3_backends_put(store, key, b"x")
    return keys


class TestManyObjects:
    def test_more_objects_than_s3_names_at_once_are_listed_and_deleted(
        self, store: S3Store, s3_server: S3Server
    ) -> None:
        keys = seed(store, 1001)
        assert [one.key for one in store.list("m/")] == keys
        since = len(s3_server.requests)
        store.delete(iter(keys))
        assert s3_server.operations(since) == ["DeleteObjects"] * 2
        assert list(store.list()) == []

    def test_what_stands_for_folders_and_what_is_hidden_is_not_listed(self, store: S3Store) -> None:
        for key in ("", "data/", ".hidden", "data/.tmp-1", "data/1"):
            s3_backends_put(store, key, b"")
        assert [one.key for one in store.list()] == ["data/1"]

    def test_a_neighbouring_prefix_is_another_store(self, connect: Connect, store: S3Store, prefix: str) -> None:
        location = replace(store._location, prefix=prefix + "0")
        neighbour = S3Store(location)
        neighbour.put("a", [b"1"])
        assert list(store.list()) == []
        whole = S3Store(replace(location, prefix=""))
        assert [one.key for one in whole.list(prefix)] == [f"{prefix}0/a"]
        assert bytes(whole.get(f"{prefix}0/a")) == b"1"


class TestConstruction:
    """A line that says what to do, at once: no retries, nothing written."""

    @pytest.fixture
    def refuse(self, s3_server: S3Server, prefix: str) -> Callable[..., str]:
        def refuse(url: str = f"s3://{BUCKET}/PREFIX?endpoint_url=URL", **options: Any) -> str:
            with pytest.raises(StorageError) as caught:
                open_store(url.replace("URL", s3_server.url).replace("PREFIX", prefix), retry=IMPATIENT, **options)
            assert not caught.value.retryable
            assert "\n" not in str(caught.value)
            return str(caught.value)

        return refuse

    def test_a_wrong_bucket(self, refuse: Callable[..., str]) -> None:
        assert "NoSuchBucket" in (told := refuse("s3://no-such-bucket/run?endpoint_url=URL"))
        assert "check the name of the bucket" in told

    def test_a_bucket_that_cannot_be(self, refuse: Callable[..., str]) -> None:
        assert "check the name of the bucket" in refuse("s3://a b/run?endpoint_url=URL")

    @pytest.mark.parametrize(
        ("status", "code", "advice"),
        [
            (403, "InvalidAccessKeyId", "check the credentials"),
            (403, "SignatureDoesNotMatch", "check the credentials"),
            (400, "ExpiredToken", "renew"),
            (403, "AccessDenied", "s3:ListBucket"),
            (403, "RequestTimeTooSkewed", "clock"),
        ],
    )
    def test_credentials_that_the_service_refuses(
        self, refuse: Callable[..., str], s3_server: S3Server, status: int, code: str, advice: str
    ) -> None:
        since = len(s3_server.requests)
        with s3_server.disturbed(on("ListObjectsV2", answering(status, code), times=9)):
            told = refuse()
        assert code in told
        assert advice in told
        assert s3_server.operations(since) == ["ListObjectsV2"]

    @pytest.mark.parametrize("code", ["IllegalLocationConstraintException", "AuthorizationHeaderMalformed"])
    def test_a_bucket_of_another_region(self, refuse: Callable[..., str], s3_server: S3Server, code: str) -> None:
        with s3_server.disturbed(on("ListObjectsV2", answering(400, code), times=9)):
            assert "AWS_REGION" in refuse()

    @pytest.mark.parametrize(
        ("headers", "advice"), [({"x-amz-bucket-region": "eu-west-1"}, "AWS_REGION"), ({}, "check the endpoint")]
    )
    def test_a_service_that_redirects_to_another_region_or_nowhere(
        self, refuse: Callable[..., str], s3_server: S3Server, headers: dict[str, str], advice: str
    ) -> None:
        with s3_server.disturbed(lambda *_: refusal(301, "PermanentRedirect", headers=headers)):
            assert advice in refuse()

    def test_no_credentials(self, refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        assert "configure credentials" in refuse()

    def test_a_profile_that_does_not_exist(self, refuse: Callable[..., str]) -> None:
        assert "check ?profile=" in refuse(f"s3://{BUCKET}/run?endpoint_url=URL&profile=nobody")

    def test_an_endpoint_where_nobody_answers(self, refuse: Callable[..., str]) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            told = refuse(f"s3://{BUCKET}/run?endpoint_url=http://127.0.0.1:{taken.getsockname()[1]}")
        assert "check the endpoint" in told

    def test_a_region_that_cannot_be(self, refuse: Callable[..., str]) -> None:
        assert "region" in refuse(f"s3://{BUCKET}/run?endpoint_url=URL&region=not_a region")

    def test_a_place_that_may_only_be_read(
        self, refuse: Callable[..., str], s3_server: S3Server, connect: Connect
    ) -> None:
        with s3_server.disturbed(on("CreateMultipartUpload", answering(403, "AccessDenied"))):
            assert "s3:PutObject" in refuse()
        connect().put("a", [b"1"])
        with s3_server.disturbed(on("CreateMultipartUpload", answering(403, "AccessDenied"))):
            reader = connect(read_only=True)
        assert bytes(reader.get("a")) == b"1"
        for write in (
            lambda: reader.put("b", [b""]),
            lambda: reader.put_if_absent("b", []),
            lambda: reader.delete("a"),
        ):
            with pytest.raises(StorageError, match="read_only"):
                write()

    @pytest.mark.parametrize(
        "url",
        [
            "s3://",
            "s3:///run",
            "s3://b/a//c",
            "s3://b/../c",
            "s3://b/a\nb",
            "s3://b/run?colour=red",
            "s3://b/run?endpoint_url=localhost:9000",
            "s3://b/run?endpoint_url=http://user:secret@host",
        ],
    )
    def test_a_url_that_is_none(self, refuse: Callable[..., str], url: str) -> None:
        told = refuse(url)
        assert told.startswith("cannot open")
        assert "secret" not in told

    def test_a_busy_service_is_waited_for(self, s3_server: S3Server, prefix: str) -> None:
        url = f"s3://{BUCKET}/{prefix}?endpoint_url={s3_server.url}"
        with s3_server.disturbed(on("ListObjectsV2", answering(503, "SlowDown"), times=2)):
            open_store(url, retry=IMPATIENT).put("a", [b"1"])

    def test_opening_writes_nothing(self, store: S3Store) -> None:
        assert list(store.list()) == []
        assert unfinished_uploads(store) == []


class TestOpening:
    def test_endpoint_region_and_profile_come_from_the_url(
        self, s3_server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "credentials").write_text("[team]\naws_access_key_id = team-key\naws_secret_access_key = x\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        url = f"s3://{BUCKET}/{prefix}?endpoint_url={s3_server.url}&region=eu-west-3&profile=team"
        store = open_store(url)
        store.put("a", [b"1"])
        assert "Credential=team-key/" in s3_server.requests[-1].header("Authorization")
        assert "/eu-west-3/s3/" in s3_server.requests[-1].header("Authorization")
        assert store.url == url
        assert bytes(open_store(store.url).get("a")) == b"1"

    def test_endpoint_and_region_come_from_the_environment(
        self, s3_server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
        store = open_store(f"S3://{BUCKET}/{prefix}/")
        store.put("a", [b"1"])
        assert "/eu-north-1/s3/" in s3_server.requests[-1].header("Authorization")
        assert store.url == f"s3://{BUCKET}/{prefix}"

    def test_characters_that_urls_give_a_meaning_may_stand_in_a_prefix(self, s3_server: S3Server, prefix: str) -> None:
        store = open_store(f"s3://{BUCKET}/{prefix}/day=1, 50% #2+é?endpoint_url={s3_server.url}")
        store.put("a/b", [b"1"])
        assert [one.key for one in store.list("a/", after="a/a")] == ["a/b"]
        assert bytes(store.get("a/b")) == b"1"
        store.delete(["a/b"])
        assert list(store.list()) == []
