"""Measures stores against boto3's own transfer manager: upload and download of the same bytes in the same run.

It must not know repositories.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import TYPE_CHECKING, Any

import numpy as np
from script import result_of, script_parser, show, write_result
from timing import rounds_of, seconds_of

if TYPE_CHECKING:
    from rows import Row

MIB = 1 << 20
BUCKET = "benchmark"
AT_LEAST = 0.8
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

Arms = Mapping[str, Callable[[], object]]
"""What is timed in turn, by name."""


def main(argv: list[str] | None = None) -> int:
    write_result(parse_arguments(argv), "stores", run)
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "stores.json")
    parser.add_argument("--mib", type=int, default=128, help="of the object")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of A B A B, at most")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds, then no more rounds begin")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from conditions import conditions

    facts = conditions(folder) | {"object_bytes": arguments.mib * MIB, "repeats": arguments.repeats}
    facts["versions"] |= {name: version(name) for name in ("boto3", "moto")}
    with moto(folder) as url:
        rows = measure(url, folder, arguments.mib * MIB, arguments.repeats, arguments.budget)
    show(rows)
    return result_of(facts, rows)


@contextmanager
def moto(folder: Path) -> Iterator[str]:
    """A server in a process of its own, which ends with its standard input."""
    environ = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", _SERVER]
    with Popen(command, env=environ, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def measure(url: str, folder: Path, size: int, repeats: int, budget: float) -> list[Row]:
    import boto3

    from incremental_ckpt.storage import LocalStore
    from incremental_ckpt.storage.s3 import S3Store
    from incremental_ckpt.storage.s3_client import Location

    session = boto3.Session("any", "any", region_name="us-east-1")
    client = session.client("s3", endpoint_url=url)
    client.create_bucket(Bucket=BUCKET)
    content = np.random.default_rng(0).bytes(size)
    source, target, bare = folder / "source", folder / "target", folder / "bare"
    source.write_bytes(content)
    s3, local = S3Store(Location(BUCKET, "run", url), session=session), LocalStore(folder / "run")
    memory, fetched = memoryview(bytearray(size)), BytesIO(bytes(size))
    memory[:] = content  # touched

    def write_bare() -> None:
        with bare.open("wb", buffering=0) as file:
            assert file.write(content) == size
            os.fsync(file.fileno())

    def read_bare() -> None:
        with bare.open("rb", buffering=0) as file:
            assert file.readinto(memory) == size

    def fetch() -> None:
        fetched.seek(0)
        client.download_fileobj(BUCKET, "theirs", fetched)

    def clear() -> None:
        for store in (s3, local):
            store.delete(["object"])
        client.delete_object(Bucket=BUCKET, Key="theirs")
        bare.unlink(missing_ok=True)

    uploads: Arms = {
        "fileobj": lambda: client.upload_fileobj(BytesIO(content), BUCKET, "theirs in memory"),
        "file": lambda: client.upload_file(str(source), BUCKET, "theirs"),
        "bare": write_bare,
        "s3": lambda: s3.put("object", [content]),
        "local": lambda: local.put("object", [content]),
    }
    downloads: Arms = {
        "fileobj": fetch,
        "file": lambda: client.download_file(BUCKET, "theirs", str(target)),
        "bare": read_bare,
        "s3": lambda: s3.get("object", into=memory),
        "local": lambda: local.get("object", into=memory),
    }
    up = rounds_of(lambda: (clear(), seconds_of_each(uploads))[1], repeats, budget / 2)
    seconds_of_each(downloads)  # direct writes leave nothing in the page cache; from now on all is there
    memory[:] = bytes(size)
    down = rounds_of(lambda: seconds_of_each(downloads), repeats, budget / 2)
    assert target.read_bytes() == content == fetched.getvalue() == memory == s3.get("object")
    for store in (s3, local):
        store.close()
    client.close()
    bares = {"upload": "a bare write and fsync", "download": "a bare read"}
    return [
        row
        for what, rounds in (("upload", up), ("download", down))
        for row in (
            speed(f"{what}, s3", f"boto3's {what}_file", "s3", "file", rounds, size, AT_LEAST),
            speed(f"{what}, local", f"boto3's {what}_file", "local", "file", rounds, size, AT_LEAST),
            speed(f"{what}, s3", f"boto3's {what}_fileobj, in memory", "s3", "fileobj", rounds, size),
            speed(f"{what}, local", bares[what], "local", "bare", rounds, size),
        )
    ]


def seconds_of_each(arms: Arms) -> Mapping[str, float]:
    return {name: seconds_of(arm) for name, arm in arms.items()}


def speed(
    what: str,
    peer: str,
    ours: str,
    theirs: str,
    rounds: list[Mapping[str, float]],
    size: int,
    at_least: float | None = None,
) -> Row:
    from rows import Target, ratio_row

    return ratio_row(
        "stores",
        f"{what}: speed, of that of {peer}",
        [(seconds[theirs], seconds[ours]) for seconds in rounds],
        None if at_least is None else Target("at least", at_least),
        bytes_per_second=size / float(np.median([seconds[ours] for seconds in rounds])),
        peer_bytes_per_second=size / float(np.median([seconds[theirs] for seconds in rounds])),
    )


if __name__ == "__main__":
    sys.exit(main())
