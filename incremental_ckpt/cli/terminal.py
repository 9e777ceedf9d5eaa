"""What a stream can show: styles and a moving cursor on a terminal, plain lines anywhere else.

It must not know what is shown.
"""

from __future__ import annotations

import os
from typing import TextIO

_PLAIN = ("", "dumb", "unknown")


def is_capable(stream: TextIO) -> bool:
    """Whether it is a terminal that understands more than plain lines."""
    return stream.isatty() and os.environ.get("TERM", "") not in _PLAIN


def has_colours(stream: TextIO) -> bool:
    """Whatever FORCE_COLOR says: what is piped is read by programs."""
    return is_capable(stream) and not os.environ.get("NO_COLOR")
