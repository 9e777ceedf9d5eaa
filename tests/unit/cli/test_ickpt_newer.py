"""What ``ickpt check`` advises where a newer version has written something: an upgrade, and no copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from incremental_ckpt import Repository, open_store
from incremental_ckpt.compaction import compact
from incremental_ckpt.format.sealed import seal, unseal

Ickpt = Callable[..., Any]
BASE = "manifests/00000004.base.json"
COPY = "If there is a copy of the store, put the"
UPGRADE = "What a newer version has written is whole for all that this one can tell: upgrade incremental_ckpt."


def make_newer(path: Path) -> None:
    members = unseal(path.read_bytes(), str(path))
    del members["digest"]
    path.unlink()
    path.write_bytes(seal(members | {"format": 2}))


def spoil(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[200] ^= 1
    path.unlink()
    path.write_bytes(raw)


def advice(out: str) -> str:
    return out.partition("what to do\n")[2]


def test_a_newer_equivalent_base_asks_for_an_upgrade_and_for_no_copy(ickpt: Ickpt, place: Path) -> None:
    compact(Repository(open_store(place)))
    make_newer(place / BASE)
    answer = ickpt("check", place)
    assert answer.code == 6
    assert (
        f"all 4 checkpoints in {place} can be restored, but not all is whole; the first problem: {BASE}" in answer.err
    )
    assert UPGRADE in advice(answer.out)
    assert COPY not in answer.out
    assert "Until then, nothing is lost: a resume replays the chain that the newer compaction stands for." in answer.out
    told = ickpt("check", place, "--json").json
    assert (told["resumes"], [(p["key"], p["newer"]) for p in told["problems"]]) == (4, [(BASE, True)])


def test_a_damaged_one_asks_for_a_copy_and_for_no_upgrade(ickpt: Ickpt, place: Path) -> None:
    compact(Repository(open_store(place)))
    spoil(place / BASE)
    answer = ickpt("check", place)
    assert answer.code == 5
    assert f"{COPY} objects named above back" in advice(answer.out)
    assert "Without one, nothing is lost: a resume replays the chain that the damaged compaction" in answer.out
    assert "upgrade" not in advice(answer.out)
    assert [p["newer"] for p in ickpt("check", place, "--json").json["problems"]] == [False]


def test_of_damage_and_something_newer_each_is_told_what_helps(ickpt: Ickpt, place: Path) -> None:
    compact(Repository(open_store(place)), 2)
    make_newer(place / "manifests/00000002.base.json")
    next(place.glob("data/00000004-*/*.safetensors")).unlink()
    answer = ickpt("check", place)
    assert answer.code == 5
    assert f"{COPY} damaged objects back" in advice(answer.out)
    assert UPGRADE in advice(answer.out)
    assert "Without either, a resume fails: it asks for the upgrade" in advice(answer.out)
    problems = ickpt("check", place, "--json").json["problems"]
    assert {p["key"].partition("-")[0] for p in problems} == {"manifests/00000002.base.json", "data/00000004"}


@pytest.mark.parametrize("named", ["manifests/00000004.json", "manifests/00000002.json"])
def test_where_the_newest_needs_an_upgrade_a_resume_is_said_to_ask_for_it(
    named: str, ickpt: Ickpt, place: Path
) -> None:
    make_newer(place / named)
    answer = ickpt("check", place)
    assert answer.code == 6
    assert UPGRADE in advice(answer.out)
    assert (
        "Until then, a resume fails: it asks for the upgrade, and takes no older checkpoint by itself. " in answer.out
    )
    assert COPY not in answer.out
    assert ickpt("check", place, "--json").json["resumes"] is None


def test_where_all_is_newer_nobody_is_sent_to_another_place(ickpt: Ickpt, place: Path) -> None:
    make_newer(place / "manifests/00000001.json")
    answer = ickpt("check", place)
    assert (answer.code, ickpt("check", place, "--json").json["restorable"]) == (6, [])
    assert "Until then, nothing can be resumed from this store." in advice(answer.out)
    assert "start a new run" not in answer.out


def test_of_an_equivalent_base_without_its_chain_what_a_prune_took_is_not_missed(ickpt: Ickpt, place: Path) -> None:
    compact(Repository(open_store(place)))
    assert ickpt("prune", place, "--keep-last", "1").code == 0
    make_newer(place / BASE)
    told = ickpt("check", place, "--json").json
    assert (told["damaged"], [p["key"] for p in told["problems"]]) == ([4], [BASE])
    assert told["resumes"] is None
