"""The benchmark of codecs at a tiny size: every measure is there; how fast is no matter here, errors and bytes are."""

from __future__ import annotations

import json
from multiprocessing.context import ForkServerContext
from pathlib import Path

import forked

from incremental_ckpt.codecs.compiled import SPAN_LOOP

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "codec_speed.py"


def test_every_measure_has_its_row_and_errors_and_bytes_reach_their_targets(
    forks: ForkServerContext, tmp_path: Path
) -> None:
    out = tmp_path / "codecs.json"
    sizes = ["--rows", "256", "--greedy-rows", "64", "--repeats", "2"]
    done = forked.run(forks, BENCHMARK, *sizes, "--out", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    aimed = {
        what: [r for r in rows if r["measure"] == f"codecs: {what}" and r["target"]]
        for what in ("speed", "error", "bytes")
    }
    speeds = 16 if SPAN_LOOP else 11
    assert {what: len(found) for what, found in aimed.items()} == {"speed": speeds, "error": 6, "bytes": 3}
    assert [r["what"] for r in aimed["error"] + aimed["bytes"] if not r["reached"]] == []
    assert all(r["ratio"] > 0 for r in rows)
