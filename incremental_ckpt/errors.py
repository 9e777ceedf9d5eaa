"""The exceptions of incremental_ckpt: one class for each thing a caller would do differently.

It must not know anything else of the package.

    CheckpointError                 anything below
    |-- NotFoundError               no such checkpoint, table or object: ask for another one
    |-- ConflictError               another job has committed to this store: stop this job
    |-- CorruptionError             bytes are not what was written: restore an ancestor, or the object from a copy
    |-- FormatError                 not a repository, or written by a newer version: upgrade, or give another path
    |-- MismatchError               model and checkpoint name different tables or parameters: fix the model or
    strict=False
    |-- SaveError                   this save failed, its rows go into the next one: free the cause, train on
    `-- StorageError                the store does not answer or refuses: fix disk, network or credentials
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base class of every error that incremental_ckpt raises on purpose."""


class NotFoundError(CheckpointError, LookupError):
    """No such checkpoint, table or object.

    Attributes:
        key: the object's key, or None where no single object is meant.
    """

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class ConflictError(CheckpointError):
    """Another job has committed a checkpoint that this job would have written; this job must stop."""


class CorruptionError(CheckpointError):
    """An object's bytes are not those that were written.

    Attributes:
        key: the object's key in the store.
        expected: what was recorded (a size, a digest, a checksum), as text.
        found: what was read, as text.
    """

    def __init__(self, message: str, *, key: str, expected: str = "", found: str = "") -> None:
        super().__init__(message)
        self.key = key
        self.expected = expected
        self.found = found


class FormatError(CheckpointError):
    """Not a repository of this library, or written in a newer format or with an unknown feature."""


class MismatchError(CheckpointError):
    """The model and the checkpoint do not have the same tables, shapes, dtypes or parameters."""


class SaveError(CheckpointError):
    """A save failed and committed nothing; its rows stay marked and go into the next delta. The cause is chained."""


class StorageError(CheckpointError):
    """The store refused an operation or did not answer.

    Attributes:
        retryable: whether the same operation may succeed if tried again (a time-out, throttling).
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
