"""Measures stores against boto3's own transfer manager: upload and download of the same bytes in the same run.

It must not know repositories.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
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


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="store-benchmark-") as folder:
        result = run(arguments, Path(folder))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {arguments.out}")
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="of the object")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of A B A B, at most")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds, then no more rounds begin")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "stores.json")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from conditions import conditions

    facts = conditions(folder) | {"object_bytes": arguments.mib * MIB, "repeats": arguments.repeats}
    with moto(folder) as url:
        rows = measure(url, folder, arguments.mib * MIB, arguments.repeats, arguments.budget)
    for row in rows:
        print(f"  {row['ratio']:8.3f}  {row['what']}", flush=True)
    facts["load_average_at_the_end"] = os.getloadavg()[0]
    return {"created": datetime.now(UTC).isoformat(timespec="seconds"), "conditions": facts, "rows": rows}


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


def measure(url: str, folder: Path, size: int, repeats: int, budget: float) -> list[dict[str, Any]]:
    import boto3
    from rows import Target, ratio_row
    from timing import rounds_of, seconds_of

    from incremental_ckpt.storage import LocalStore, Store
    from incremental_ckpt.storage.s3 import S3Store
    from incremental_ckpt.storage.s3_client import Location

    session = boto3.Session("any", "any", region_name="us-east-1")
    client = session.client("s3", endpoint_url=url)
    client.create_bucket(Bucket=BUCKET)
    content = np.random.default_rng(0).bytes(size)
    source, target = folder / "source", folder / "target"
    source.write_bytes(content)
    stores: dict[str, Store] = {
        "s3": S3Store(Location(BUCKET, "run", url), session=session),
        "local": LocalStore(folder / "run"),
    }
    buffer = memoryview(np.empty(size, np.uint8))
    buffer[:] = content  # touched

    def clear() -> None:
        for store in stores.values():
            store.delete(["object"])
        client.delete_object(Bucket=BUCKET, Key="theirs")

    def timed(action: Callable[[], object]) -> Callable[[], float]:
        return lambda: seconds_of(action)

    def upload_all() -> tuple[float, ...]:
        clear()
        return tuple(arm() for arm in uploads)

    uploads = [
        timed(lambda: client.upload_file(str(source), BUCKET, "theirs")),
        *(timed(lambda store=store: store.put("object", [content])) for store in stores.values()),
    ]
    downloads = [
        timed(lambda: client.download_file(BUCKET, "theirs", str(target))),
        *(timed(lambda store=store: store.get("object", into=buffer)) for store in stores.values()),
    ]
    up = rounds_of(upload_all, repeats, budget / 2)
    down = rounds_of(lambda: tuple(arm() for arm in downloads), repeats, budget / 2)
    assert target.read_bytes() == content == buffer
    for store in stores.values():
        store.close()
    client.close()
    found = []
    for what, rounds in (("upload", up), ("download", down)):
        for number, name in enumerate(stores, 1):
            found.append(
                ratio_row(
                    "stores",
                    f"{what}, {name}: speed, of that of boto3's {what}_file",
                    [(times[0], times[number]) for times in rounds],
                    Target("at least", AT_LEAST),
                    bytes_per_second=size / float(np.median([times[number] for times in rounds])),
                    boto3_bytes_per_second=size / float(np.median([times[0] for times in rounds])),
                ).as_json()
            )
    return found


if __name__ == "__main__":
    sys.exit(main())
