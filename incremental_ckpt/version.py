"""The version of the package.

It must not know anything else of it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("incremental-ckpt")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
