"""Bytes by key: the Store protocol and the stores that come with the package.

It must not know what the bytes mean.
"""

from __future__ import annotations

from incremental_ckpt.storage.base import Buffer, Store, StoredObject
from incremental_ckpt.storage.local import LocalStore
from incremental_ckpt.storage.memory import MemoryStore
from incremental_ckpt.storage.open import open_store

__all__ = ["Buffer", "LocalStore", "MemoryStore", "Store", "StoredObject", "open_store"]
