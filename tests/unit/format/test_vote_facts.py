"""What rank 0 and a resuming rank take from a rank manifest without reading all of it is what all of it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from incremental_ckpt.errors import CorruptionError
from incremental_ckpt.format.manifest import RankManifest, VoteFacts
from incremental_ckpt.format.sealed import seal, unseal

GOLDEN = Path(__file__).parents[2] / "golden" / "v1" / "format" / "repository"
VOTES = sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("data/*/rank-*.json"))


@pytest.mark.parametrize("key", VOTES)
def test_facts_of_a_vote_are_those_of_its_manifest(key: str) -> None:
    raw = (GOLDEN / key).read_bytes()
    whole, facts = RankManifest.from_bytes(raw, key), VoteFacts.from_bytes(raw, key)
    assert (facts.key, facts.vote, facts.error, facts.rows) == (whole.key, whole.vote, whole.error, whole.rows)
    assert facts.pack_bytes == sum(pack.size for pack in whole.packs)
    assert facts.shared == (any(s.name == "shared" for s in whole.state) or any(s.replicated for s in whole.shards))
    counted = [s for s in whole.shards if s.shard.col_start == 0 and (whole.rank == 0 or not s.replicated)]
    assert facts.table_rows == sum(s.shard.rows for s in counted)


@pytest.mark.parametrize("key", VOTES)
def test_wanted_shards_are_read_whole_and_the_others_are_left_out(key: str) -> None:
    raw = (GOLDEN / key).read_bytes()
    whole = RankManifest.from_bytes(raw, key)
    for shard in whole.shards:
        part = RankManifest.partly_from_bytes(raw, key, lambda place, name=shard.shard.table: place.table == name)
        assert part.shards == tuple(s for s in whole.shards if s.shard.table == shard.shard.table)
        assert (part.packs, part.state) == (whole.packs, whole.state)


def test_a_vote_of_another_key_or_without_sense_is_refused() -> None:
    raw = (GOLDEN / VOTES[0]).read_bytes()
    with pytest.raises(CorruptionError):
        VoteFacts.from_bytes(raw, VOTES[1])
    members = unseal(raw, VOTES[0])
    members = {name: value for name, value in members.items() if name != "digest"} | {"vote": "perhaps"}
    with pytest.raises(CorruptionError, match="neither ok nor failed"):
        VoteFacts.from_bytes(seal(members), VOTES[0])
