"""JSON as the verbs print it.

It must not know what it says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from incremental_ckpt.format.members import written_time


def to_json(value: object) -> str:
    """One JSON document: times in ISO 8601 (UTC), numbers that JSON lacks (nan, inf) as null."""
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: object) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, datetime):
        return written_time(value)
    if isinstance(value, Mapping):
        # As manifests write nan and inf where they do not say what a member means.
        if value.keys() == {"$float"}:
            return None
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
