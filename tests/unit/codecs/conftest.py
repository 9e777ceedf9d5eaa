"""Makes the tables of numbers of these tests importable by their plain name, and builds the compiled loop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "oracle"))

from repeatable import one_thread, store_name
from span_builds import BUILDS, INSTALLED, SOURCE, build, loop_in

from incremental_ckpt.codecs.compiled import SpanLoop

__all__ = ["store_name"]

one_thread()


@pytest.fixture(scope="session", params=[*INSTALLED, *BUILDS])
def loop_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each build of the loop lies."""
    if request.param in INSTALLED:
        return SOURCE.parent
    folder = tmp_path_factory.mktemp("loop")
    build(folder, flags=BUILDS[request.param])
    return folder


@pytest.fixture(scope="session")
def loop(loop_folder: Path) -> SpanLoop:
    return loop_in(loop_folder)
