"""Tables of one name on several ranks are one table or are refused: no compaction mixes what ranks trained apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rank_processes import Ranks

from incremental_ckpt import Repository, open_store


def test_tables_of_one_name_that_nothing_keeps_alike_are_refused_on_all_ranks_with_what_to_do(
    ranks: Ranks, tmp_path: Path
) -> None:
    for seen in ranks.run(3, "local_tables.tables_of_one_name", str(tmp_path)):
        for case in ("local", "unwrapped"):
            kind, text = seen[case]
            assert kind == "MismatchError"
            assert "table tables.user is held by ranks 0, 1, 2, more of it than there is" in text
            assert "give the Checkpointer the DistributedDataParallel module itself" in text
            assert "names of their own" in text
        assert seen["replica"] == ("", "None")
        assert seen["of one rank"][0] == "MismatchError"
        assert "table tables.user is held by ranks 1, 2," in seen["of one rank"][1]
    assert [*tmp_path.iterdir()] == []


def test_tables_with_names_of_their_own_and_replicas_come_back_on_each_rank_from_a_compaction(
    ranks: Ranks, tmp_path: Path
) -> None:
    url = str(tmp_path / "store")
    saved = ranks.run(2, "local_tables.tables_of_each_rank", url, False)
    assert Repository(open_store(url)).listing().bases == {3}
    resumed = ranks.run(2, "local_tables.tables_of_each_rank", url, True)
    for before, after in zip(saved, resumed, strict=True):
        assert before.keys() == after.keys()
        for name in before:
            assert np.array_equal(before[name], after[name]), name
    assert np.array_equal(saved[0]["shared.tables.all.weight"], saved[1]["shared.tables.all.weight"])
