"""What an export's reader predicts is what the trained model does; with real rows: ``export_predictions.py --data``."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path

import forked
import synthetic

SCRIPT = Path(__file__).parent / "export_predictions.py"


def test_models_read_from_every_export_predict_the_same_bits(forks: ForkServerContext, tmp_path: Path) -> None:
    synthetic.write_file(tmp_path / "criteo.tsv", 400, seed=0)
    sizes = ["--steps", "8", "--dim", "8", "--batch-size", "32", "--batches", "4", "--max-rows-per-table", "500"]
    done = forked.run(forks, SCRIPT, "--data", tmp_path / "criteo.tsv", *sizes, "--shardings", "mixed")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[1:] == [
        "torch: equal, bit for bit",
        "safetensors: equal, bit for bit",
        "dcp, 2 ranks, mixed: equal, bit for bit",
    ]
