"""S3 services on loopback that tests start and stop: moto behind a front that can disturb it, and MiniStack."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import boto3
import pytest
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Response

BUCKET = "runs"
PAGE = 50
"""Objects in a page of a listing; S3 gives 1,000."""

_WRITE_OPERATIONS = {"PutObject", "CompleteMultipartUpload"}


@dataclass(frozen=True)
class Request:
    """A request as S3 names it: ``operation`` is PutObject, UploadPart, GetObject, ListObjectsV2 and so on."""

    operation: str
    key: str
    body: bytes
    environ: dict[str, Any]

    def header(self, name: str) -> str:
        return str(self.environ.get("HTTP_" + name.upper().replace("-", "_"), ""))


class DroppedConnectionError(Exception):
    """Raised by a disturbance: the connection breaks and the client gets no answer."""


@dataclass(frozen=True)
class Cut:
    """Returned by a disturbance: the first bytes of an answer, then the connection breaks."""

    response: Response
    keep: int


Answer = Response | Cut
Proceed = Callable[[Request], Answer]
Disturbance = Callable[[Request, Proceed], Answer]


def refusal(status: int, code: str, message: str = "so it is", headers: dict[str, str] | None = None) -> Response:
    xml = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Response(xml, status, headers, mimetype="application/xml")


class S3Server:
    """moto over HTTP. In front of it stands what moto lacks: conditions are checked and objects written in one step,
    also when an upload is completed, and bytes are compared with their CRC-32. Its pages are short.

    Attributes:
        requests: the operations so far, in the order in which they came.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._disturbances: list[Disturbance] = []
        self._writing = threading.Lock()
        self._moto = create_backend_app("s3")
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self._server.daemon_threads = True  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @contextmanager
    def disturbed(self, *disturbances: Disturbance) -> Iterator[None]:
        self._disturbances[:] = disturbances
        try:
            yield
        finally:
            self._disturbances.clear()

    def operations(self, since: int = 0) -> Sequence[str]:
        return [request.operation for request in self.requests[since:]]

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        request = Request(_operation(environ), environ["PATH_INFO"].removeprefix(f"/{BUCKET}/"), body, environ)
        self.requests.append(request)
        proceed: Proceed = self._perform
        for disturbance in reversed([*self._disturbances]):
            proceed = _through(disturbance, proceed)
        try:
            answer = proceed(request)
        except DroppedConnectionError:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return Response()(environ, start_response)
        if isinstance(answer, Cut):
            start_response(answer.response.status, answer.response.headers.to_wsgi_list())
            return _cut(answer, environ["werkzeug.socket"])
        return answer(environ, start_response)

    def _perform(self, request: Request) -> Answer:
        claimed = request.header("x-amz-checksum-crc32")
        if claimed and claimed != b64encode(crc32(request.body).to_bytes(4, "big")).decode():
            return refusal(400, "BadDigest", "The CRC32 you specified did not match what we received.")
        if request.operation == "ListObjectsV2" and "max-keys=" not in request.environ["QUERY_STRING"]:
            request.environ["QUERY_STRING"] += f"&max-keys={PAGE}"
        if request.operation not in _WRITE_OPERATIONS:
            return self._ask_moto(request)
        with self._writing:
            if request.header("If-None-Match") and self._exists(request):
                return refusal(412, "PreconditionFailed", "At least one of the pre-conditions did not hold")
            return self._ask_moto(request)

    def _exists(self, request: Request) -> bool:
        environ = {**request.environ, "REQUEST_METHOD": "HEAD", "QUERY_STRING": "", "CONTENT_LENGTH": "0"}
        environ.pop("HTTP_IF_NONE_MATCH")
        return self._ask_moto(replace(request, body=b"", environ=environ)).status_code == 200

    def _ask_moto(self, request: Request) -> Response:
        return Response.from_app(self._moto, {**request.environ, "wsgi.input": BytesIO(request.body)}, buffered=True)


class _Quiet(WSGIRequestHandler):
    disable_nagle_algorithm = True  # head and body are two writes: the second one would wait for the client

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


def _through(disturbance: Disturbance, proceed: Proceed) -> Proceed:
    return lambda request: disturbance(request, proceed)


def _cut(answer: Cut, connection: socket.socket) -> Iterator[bytes]:
    yield answer.response.get_data()[: answer.keep]
    connection.shutdown(socket.SHUT_RDWR)


def _operation(environ: dict[str, Any]) -> str:
    method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
    if environ["PATH_INFO"].count("/") == 1:
        return {"GET": "ListObjectsV2", "POST": "DeleteObjects", "PUT": "CreateBucket"}.get(method, f"{method} bucket")
    if method == "POST":
        return "CompleteMultipartUpload" if "uploadId=" in query else "CreateMultipartUpload"
    if "uploadId=" in query:
        return {"PUT": "UploadPart", "DELETE": "AbortMultipartUpload"}[method]
    return {"GET": "GetObject", "PUT": "PutObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}[method]


@contextmanager
def ministack(folder: Path) -> Iterator[str]:
    """MiniStack in a process of its own; gives its URL."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    log = folder / "ministack.log"
    environ = {**os.environ, "GATEWAY_PORT": str(port), "SERVICES": "s3", "HOME": str(folder), "TMPDIR": str(folder)}
    with log.open("wb") as output:
        command = [sys.executable, "-m", "ministack"]
        process = subprocess.Popen(command, env=environ, cwd=folder, stdout=output, stderr=output)
    try:
        _await_port(port, process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _await_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            threading.Event().wait(0.1)
        else:
            return
    raise AssertionError(f"no server after a minute: {log.read_text()}")


def isolate_from_aws(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Credentials that mean nothing, and nothing of this machine's configuration."""
    for name in [name for name in os.environ if re.match(r"AWS_|BOTO", name)]:
        patch.delenv(name)
    patch.setenv("AWS_ACCESS_KEY_ID", "testing")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("AWS_CONFIG_FILE", str(folder / "no-config"))
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "no-credentials"))


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[boto3.Session]:
    with pytest.MonkeyPatch.context() as patch:
        isolate_from_aws(patch, tmp_path_factory.mktemp("aws"))
        yield boto3.Session()


@pytest.fixture(scope="session")
def s3_server(aws: boto3.Session) -> Iterator[S3Server]:
    server = S3Server()
    server.start()
    make_bucket(aws, server.url)
    yield server
    server.stop()


def make_bucket(session: boto3.Session, url: str, name: str = BUCKET) -> None:
    client = session.client("s3", endpoint_url=url, region_name="us-east-1")
    client.create_bucket(Bucket=name)
    client.close()
