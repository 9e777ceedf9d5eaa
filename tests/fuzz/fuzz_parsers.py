"""An atheris target: coverage-guided bytes for every parser of the format. What comes out untyped ends it.

``python tests/fuzz/fuzz_parsers.py -max_total_time=300 CORPUS`` takes libFuzzer's options; the first byte of an input
chooses the parser and whether the rest is sealed with its right digest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
with atheris.instrument_imports(include=["incremental_ckpt.format"]):
    from parsers import HONEST, PARSERS, SEALED, parse, sealed, unsealed

NAMES = sorted(PARSERS)
SEALS = 0x80


def one_input(raw: bytes) -> None:
    if not raw:
        return
    name = NAMES[(raw[0] & ~SEALS) % len(NAMES)]
    rest = raw[1:]
    parse(name, sealed(rest) if raw[0] & SEALS and name in SEALED else rest)


def write_seeds(corpus: Path) -> None:
    """An honest input for every parser, sealed by the target where it has a seal."""
    corpus.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(NAMES):
        is_sealed = name in SEALED
        seed = bytes([number | SEALS * is_sealed]) + (unsealed(HONEST[name]) if is_sealed else HONEST[name])
        (corpus / f"honest-{name.replace(' ', '-')}").write_bytes(seed)


if __name__ == "__main__":
    for folder in (argument for argument in sys.argv[1:] if not argument.startswith("-")):
        write_seeds(Path(folder))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
