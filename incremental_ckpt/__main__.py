"""``python -m incremental_ckpt``: the command line without an installed ``ickpt``.

It must not know any verb.
"""

from __future__ import annotations

import sys

from incremental_ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
