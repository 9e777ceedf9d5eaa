"""Where an S3 store is, as a URL says it, and a boto3 client for it.

It must not know keys, nor repeat anything: the client's own retries are off.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from incremental_ckpt.errors import StorageError
from incremental_ckpt.storage.s3_errors import storage_error

_FORM = "s3://BUCKET/PREFIX, with ?endpoint_url=, region= and profile= if need be"
_URL = re.compile(r"s3://(?P<bucket>[^/?]+)(?:/(?P<prefix>[^?]*))?(?:\?(?P<options>.*))?", re.IGNORECASE | re.DOTALL)
_SESSIONS = threading.Lock()


@dataclass(frozen=True)
class Location:
    """A prefix of a bucket. What is None comes from the environment and the configuration files, as everywhere in AWS.

    Attributes:
        prefix: without slashes at its ends; empty for the whole bucket.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None

    @classmethod
    def parse(cls, url: str) -> Location:
        """Raises StorageError for what is not of the form ``s3://BUCKET/PREFIX?endpoint_url=…&region=…&profile=…``."""
        found = _URL.fullmatch(url)
        if found is None:
            raise StorageError(f"cannot open {url!r}: an S3 URL is {_FORM}")
        prefix = (found["prefix"] or "").strip("/")
        if prefix and any(segment in ("", ".", "..") or not segment.isprintable() for segment in prefix.split("/")):
            raise StorageError(f"cannot open {url!r}: a segment of the prefix is empty, '.', '..' or not printable")
        known = {field.name for field in fields(cls)} - {"bucket", "prefix"}
        options = dict(parse_qsl(found["options"] or "", keep_blank_values=True))
        if unknown := sorted(options.keys() - known):
            raise StorageError(f"cannot open {url!r}: no option {', '.join(unknown)}. An S3 URL is {_FORM}")
        endpoint = urlsplit(options.get("endpoint_url", "http://host"))
        if endpoint.scheme not in ("http", "https") or not endpoint.hostname or endpoint.username is not None:
            raise StorageError(
                f"cannot open s3://{found['bucket']}/{prefix}: endpoint_url must be http(s)://HOST[:PORT], without "
                "credentials; they come from the environment or a profile"
            )
        return cls(found["bucket"], prefix, **options)

    @property
    def url(self) -> str:
        given = {name: value for name in ("endpoint_url", "region", "profile") if (value := getattr(self, name))}
        place = f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"
        return f"{place}?{urlencode(given, safe=':/')}" if given else place


def connect(location: Location, connect_timeout: float, read_timeout: float, connections: int, session: Any) -> Any:
    """A boto3 client of the usual chain of credentials. Sends nothing.

    Args:
        connect_timeout: seconds.
        read_timeout: seconds without a byte.
        connections: kept open for the next request.
        session: a boto3.Session, or None to make one for the profile.

    Raises:
        StorageError: no such profile, an endpoint or a region that cannot be, or broken configuration files.
    """
    config = Config(
        connect_timeout=connect_timeout,
        read_timeout=read_timeout,
        max_pool_connections=connections,
        tcp_keepalive=True,
        retries={"total_max_attempts": 1, "mode": "standard"},
        # A CRC-32 goes with every write; reads are ranges, for which S3 has none: packs and manifests bring theirs.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        with _SESSIONS:  # the making of clients is not thread-safe
            return (session or boto3.Session(profile_name=location.profile)).client(
                "s3", region_name=location.region, endpoint_url=location.endpoint_url, config=config
            )
    except (BotoCoreError, ValueError) as error:
        raise storage_error(f"open {location.url}", error) from error
