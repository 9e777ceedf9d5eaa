import pytest

pytest.register_assert_rewrite("incremental_ckpt.testing.conformance")
