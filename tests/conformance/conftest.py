import pytest
from s3_server import aws, s3_server

pytest.register_assert_rewrite("incremental_ckpt.testing.conformance")

__all__ = ["aws", "s3_server"]
