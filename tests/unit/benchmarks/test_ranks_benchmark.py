"""The simulated job at a tiny size: what must not grow with the number of ranks does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[ranks.Figures]:
    return [ranks.simulate(tmp_path_factory.mktemp("ranks"), count, 5) for count in (10, 20, 40)]


def test_a_resume_with_unchanged_shards_reads_its_own_and_the_shared_manifests_only(jobs: list[ranks.Figures]) -> None:
    assert [job.same_manifests for job in jobs] == [2 * 9] * 3  # of a base and a delta, each its own and 8 shared ones
    assert [job.other_manifests for job in jobs] == [2 * job.ranks for job in jobs]


def test_a_rank_manifest_does_not_grow_with_the_ranks_and_the_manifest_does_by_a_line_each(
    jobs: list[ranks.Figures],
) -> None:
    assert jobs[-1].vote_bytes < 1.1 * jobs[0].vote_bytes
    per_rank = (jobs[2].manifest_bytes - jobs[1].manifest_bytes) / 20
    assert 100 < per_rank < 250


def test_ranks_that_are_alike_are_told_so_once(jobs: list[ranks.Figures]) -> None:
    assert jobs[-1].answer_bytes < 3 * jobs[-1].report_bytes


def test_the_result_has_a_row_for_every_growth(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    assert ranks.main(["--ranks", "16", "--tables", "2", "--folder", str(tmp_path), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert len(result["rows"]) == 8
    assert all(row["ratio"] > 0 and row["target"] for row in result["rows"])
    assert result["conditions"]["ranks"] == 16
