"""Builds _span.c as installing does, and as it is built where nothing is known of the processor."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from incremental_ckpt.codecs import compiled
from incremental_ckpt.codecs.compiled import SPAN_LOOP, SpanLoop, span_loop

SOURCE = Path(compiled.__file__).with_name("_span.c")
PROJECT = Path(__file__).parents[3]
BUILT = f"_span{EXTENSION_SUFFIXES[0]}"
BUILDS = {"built": (), "built for any processor": ("-DFOR_EACH_PROCESSOR=",)}


def build(folder: Path, source: Path = SOURCE, flags: tuple[str, ...] = ()) -> None:
    """Leave the library in the folder, under the name that it is looked for by."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.byteorder != "little":
        pytest.skip("no C compiler, or a big-endian machine: there is no loop to compare")
    extension = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"][0]
    command = [compiler, *extension["extra-compile-args"], *flags, "-fPIC", "-shared", "-o", folder / BUILT, source]
    subprocess.run(command, check=True)


def loop_in(folder: Path) -> SpanLoop:
    found = span_loop(folder)
    assert found is not None
    return found


INSTALLED = ["installed"] if SPAN_LOOP else []
