"""What a store lets its callers do: whether it is open, and may be written.

It must not know where objects lie.
"""

from __future__ import annotations

from dataclasses import dataclass

from incremental_ckpt.arguments import flag
from incremental_ckpt.errors import StorageError
from incremental_ckpt.storage.arguments import split_key


@dataclass
class Access:
    """
    Attributes:
        url: how messages name the store.
    """

    url: str
    read_only: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        flag("read_only", self.read_only)

    def check_open(self) -> None:
        """Raises StorageError for a store that has been closed."""
        if self.closed:
            raise StorageError(f"the store {self.url} has been closed: open it again")

    def check_key(self, key: str) -> None:
        """Raises StorageError also for a key that no store takes."""
        self.check_open()
        split_key(key)

    def check_writable(self, action: str, key: str) -> None:
        """Raises StorageError also for a store that may only be read."""
        self.check_key(key)
        self.check_all_writable(f"{action} {key} in")

    def check_all_writable(self, action: str) -> None:
        """As ``check_writable``, where no one key is meant."""
        self.check_open()
        if self.read_only:
            raise StorageError(f"cannot {action} {self.url}: the store was opened with read_only=True")
