"""What a user needs to test a store, or code above a store: conformance tests, faults, crashes and a trace.

It must not know anything above the storage floor. Only ``StoreTests`` needs pytest, and loads it when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from incremental_ckpt.testing.faults import LateListing, LateWrites, Stall, damage, fail, on, short_read
from incremental_ckpt.testing.stores import Crash, CrashStore, FaultStore, Injector, Op, Perform, Traced, TracingStore

if TYPE_CHECKING:
    from incremental_ckpt.testing.conformance import StoreTests

__all__ = [
    "Crash",
    "CrashStore",
    "FaultStore",
    "Injector",
    "LateListing",
    "LateWrites",
    "Op",
    "Perform",
    "Stall",
    "StoreTests",
    "Traced",
    "TracingStore",
    "damage",
    "fail",
    "on",
    "short_read",
]


def __getattr__(name: str) -> Any:
    if name == "StoreTests":
        from incremental_ckpt.testing.conformance import StoreTests

        return StoreTests
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
