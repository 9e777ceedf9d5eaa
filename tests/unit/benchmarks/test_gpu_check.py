"""The check for machines with a GPU, its measuring code run on the CPU at a tiny size."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import gpu_check
import pytest
import torch

with warnings.catch_warnings():
    # FBGEMM warns of operators that its CPU build lacks.
    warnings.simplefilter("ignore")
    import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401


@pytest.fixture(scope="module", params=["torch", "fbgemm"])
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gpu-check")
    out = folder / "out.json"
    arguments = ["--device", "cpu", "--tiny", "--tables", request.param, "--store", str(folder), "--out", str(out)]
    assert gpu_check.main(arguments) == 0
    assert list(folder.iterdir()) == [out]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def row_of(result: dict[str, Any], what: str) -> dict[str, Any]:
    (row,) = [row for row in result["rows"] if what in row["what"]]
    return row


def test_every_part_of_a_save_is_measured(result: dict[str, Any]) -> None:
    for part in (
        "a step with the tracker", "marking", "finding", "gather on the device", "PCIe", "right behind the copy",
        "stall of a raw delta", "stall of a base",
    ):  # fmt: skip
        ratio = row_of(result, part)["ratio"]
        assert math.isfinite(ratio), part
        assert ratio > 0, part


def test_an_interval_changes_the_wanted_share_of_the_rows(result: dict[str, Any]) -> None:
    wanted = result["conditions"]["share"] * result["conditions"]["rows"]
    assert row_of(result, "gather on the device")["details"]["rows"] == pytest.approx(wanted, rel=0.65)


def test_a_snapshot_is_of_the_call_and_a_resume_is_the_run(result: dict[str, Any]) -> None:
    assert row_of(result, "those of the call")["ratio"] == 1
    assert row_of(result, "those of the call")["details"]["compared_bytes"] > 0
    assert row_of(result, "after a resume")["ratio"] == 1


def test_the_conditions_name_device_and_tables(result: dict[str, Any]) -> None:
    assert result["conditions"]["device"] == "cpu"
    assert result["conditions"]["tables_of"]


def test_a_machine_without_a_gpu_skips_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 0
    said = capsys.readouterr().out
    assert "skipped" in said
    assert "no GPU" in said
