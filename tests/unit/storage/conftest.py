"""The S3 server of the conformance tests, also for the tests of what only S3 stores do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "conformance"))

from s3_server import aws, s3_server

__all__ = ["aws", "s3_server"]
