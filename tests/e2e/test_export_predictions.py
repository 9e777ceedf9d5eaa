"""What an export's reader predicts is what the trained model does; with real rows: ``export_predictions.py --data``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import synthetic

SCRIPT = Path(__file__).parent / "export_predictions.py"


def test_models_read_from_every_export_predict_the_same_bits(tmp_path: Path) -> None:
    synthetic.write_file(tmp_path / "criteo.tsv", 400, seed=0)
    command = [sys.executable, str(SCRIPT), "--data", str(tmp_path / "criteo.tsv"), "--steps", "8", "--dim", "8"]
    command += ["--batch-size", "32", "--batches", "4", "--max-rows-per-table", "500", "--shardings", "mixed"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[1:] == [
        "torch: equal, bit for bit",
        "safetensors: equal, bit for bit",
        "dcp, 2 ranks, mixed: equal, bit for bit",
    ]
