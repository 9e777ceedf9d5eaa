"""A limit on memory, kept by the kernel: who asks for more gets MemoryError, which is no typed error.

It must not know what is limited.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MORE = 1 << 30
"""Bytes of address space beyond what there is: room for threads and their heaps. Lies are of a terabyte at least."""


@contextmanager
def bounded_memory(more: int = MORE) -> Iterator[None]:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
