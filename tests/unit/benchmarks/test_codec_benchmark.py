"""The benchmark of codecs at a tiny size: every measure is there; how fast is no matter here, errors and bytes are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "codec_speed.py"


def test_every_measure_has_its_row_and_errors_and_bytes_reach_their_targets(tmp_path: Path) -> None:
    out = tmp_path / "codecs.json"
    arguments = ["--rows", "256", "--greedy-rows", "64", "--repeats", "2", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    aimed = {
        what: [r for r in rows if r["measure"] == f"codecs: {what}" and r["target"]]
        for what in ("speed", "error", "bytes")
    }
    assert {what: len(found) for what, found in aimed.items()} == {"speed": 10, "error": 6, "bytes": 3}
    assert [r["what"] for r in aimed["error"] + aimed["bytes"] if not r["reached"]] == []
    assert all(r["ratio"] > 0 for r in rows)
