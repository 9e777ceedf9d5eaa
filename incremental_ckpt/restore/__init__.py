"""Replays a chain into live tables: every row from the newest checkpoint that carries it, whatever the sharding was.

It must not know trackers, policies or which model the tables belong to.
"""

from __future__ import annotations

from incremental_ckpt.restore.found import Found, compare_tables, find
from incremental_ckpt.restore.rows import load_tables
from incremental_ckpt.restore.state import load_state

__all__ = ["Found", "compare_tables", "find", "load_state", "load_tables"]
