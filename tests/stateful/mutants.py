"""Mistakes that an implementer would make, put into the real code one at a time: a line of a function is exchanged for another.

A mistake whose line is no longer in the code is an error: then the mistake is to be made anew in the code as it is.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest

from incremental_ckpt.checkpointer import Checkpointer
from incremental_ckpt.persist import Persister
from incremental_ckpt.planning import Planner
from incremental_ckpt.rank_writer import RankWriter
from incremental_ckpt.repository import Repository
from incremental_ckpt.resuming import Resume
from incremental_ckpt.saving import Saver
from incremental_ckpt.snapshot import FlatState
from incremental_ckpt.stream import RowStream
from incremental_ckpt.tracker import Tracker



@dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
        home, function: where it is made.
        right, wrong: the text that is exchanged; it occurs once in the function.
        caught_as: the invariants that notice it, whichever first.
        hints: seeds of runs that catch it.
    """

    name: str
    mistake: str
    home: type
    function: str
    right: str
    wrong: str
    caught_as: tuple[str, ...]
    hints: tuple[int, ...] = ()

    def make(self, patch: pytest.MonkeyPatch) -> None:
        original = inspect.getattr_static(self.home, self.function)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.right) == 1, f"{self.right!r} occurs {source.count(self.right)} times in {self.function}"
        code = compile(source.replace(self.right, self.wrong), f"<mutant {self.name}>", "exec", dont_inherit=True, flags=_ANNOTATIONS)
        made: dict[str, Any] = {}
        exec(code, sys.modules[self.home.__module__].__dict__, made)
        patch.setattr(self.home, self.function, made[self.function])


_ANNOTATIONS = __import__("__future__").annotations.compiler_flag
_COMMITTED = "committed and flight.attempt.moves_parent"

MUTANTS = (
    Mutant(
        "marks_given_back", "marks are dropped when the save is settled, also when it failed",
        Saver, "_settle", _COMMITTED, "flight.attempt.moves_parent", ("I6",),
    ),
    Mutant(
        "failed_base_gives_back", "a failed base drops its marks, a failed delta keeps them",
        Saver, "_settle", _COMMITTED, f"flight.attempt.kind == 'base' or {_COMMITTED}", ("I6",),
    ),
    Mutant(
        "one_shot_marks_kept", "a committed one-shot delta drops its marks although the next delta counts from its parent",
        Saver, "_settle", _COMMITTED, "committed", ("I6",),
    ),
    Mutant(
        "resumed_is_next_parent", "after a resume deltas count from the base of the chain; the marks are empty",
        Planner, "begin_after", "ref_of(source) if source else None", "ref_of(resumed[0]) if source else None", ("PARENT", "I6"),
    ),
    Mutant(
        "branch_starts_with_base", "after a resume from an older number the first save may be a delta",
        Planner, "begin_after", " or source.seq != newest_seq", "", ("PARENT",),
    ),
    Mutant(
        "lineage_of_newest", "the lineage is extended from the checkpoint resumed from",
        Planner, "begin_after", "lineage_after(newest,", "lineage_after(source or newest,", ("LINEAGE",),
    ),
    Mutant(
        "next_parent_from_newest", "the next parent is kept in memory: a put that landed late is overlooked",
        Planner, "settle", "    self._adopt(verdict.newest)\n",
        "    if verdict.committed is not None:\n        self._adopt(verdict.newest)\n"
        "    elif verdict.newest is not None:\n        self._newest_seq = verdict.newest.seq\n", ("PARENT",),
    ),
    Mutant(
        "lineage_of_this_life", "a put from before an in-process resume is taken for one of the state resumed to",
        Planner, "_adopt", "newest.lineage != self._lineage", "False", ("LINEAGE", "PARENT", "I6"),
    ),
    Mutant(
        "look_after_the_attempt", "what the next attempt counts from comes from memory, not from the store",
        Persister, "_look", "newest = self._repository.newest_above(attempt.seq - 1)", "newest = committed", ("LIVE", "TOLD"),
    ),
    Mutant(
        "own_late_put_is_ours", "a late put of our own is taken for a conflict",
        Repository, "commit", "winner.job == manifest.job", "False", ("CONFLICT",),
    ),
    Mutant(
        "conflicts_are_told", "a number that another job holds is taken for a late put of our own",
        Repository, "commit", "winner.job == manifest.job", "True", ("LIVE",),
    ),
    Mutant(
        "behind_a_late_put_of_our_own", "a late put of our own holds the number, another job has gone on behind it: never told",
        Persister, "_look", "error = self._repository.lost_to(newest, attempt.job)", "pass", ("LIVE",),
    ),
    Mutant(
        "of_two_jobs_that_find_nothing", "a job that found an empty store goes on behind whatever is there at its first save",
        Checkpointer, "resume_from_checkpoint", "self._saver.planner.begin_fresh(None)", "pass", ("LINEAGE",),
    ),
    Mutant(
        "repo_json_first", "only rank 0 makes sure of repo.json before it writes",
        Persister, "persist", "self._repository.create()", "self._rank or self._repository.create()", ("ERROR",),
    ),
    Mutant(
        "one_vote_of_a_rank", "a rank whose vote got no answer votes again, otherwise",
        Persister, "persist", "may_report = False  # a vote whose", "may_report = True  # a vote whose", ("I2",),
    ),
    Mutant(
        "votes_are_awaited", "rank 0 commits although another rank has failed",
        Persister, "_vote_of", "vote.vote != \"ok\"", "False", ("I1", "ERROR", "TOLD", "LIVE"),
    ),
    Mutant(
        "fallback_by_ancestors", "the fallback is the next lower number",
        Repository, "fallbacks", "set(ancestors(self.manifest(seq).lineage, seq))", "set(range(seq))", ("READ",),
    ),
    Mutant(
        "history_in_lineage", "the parent is the only link to ancestors, and a base has none",
        Repository, "fallbacks", "set(ancestors(self.manifest(seq).lineage, seq))",
        "{p.seq for p in [self.manifest(seq).parent] if p}", ("READ",),
    ),
    Mutant(
        "marker_before_reading", "the resume marker is written after the rows are read",
        Resume, "_marked", "self._repository.write_resume_marker",
        "if self._markers: self._load(seq)\n    self._repository.write_resume_marker", ("MARKER",),
    ),
    Mutant(
        "preimages_until_copied", "old values are kept only for rows of chunks already streamed",
        RowStream, "take", "rows = rows[int(np.searchsorted(rows.numpy(), watermark)) :]",
        "rows = rows[: int(np.searchsorted(rows.numpy(), watermark))]", ("I6",),
    ),
    Mutant(
        "old_values_override", "spilled old values come before what was read from the table",
        RankWriter, "vote", "(*entries, *overriding)", "(*overriding, *entries)", ("I6",),
    ),
    Mutant(
        "old_values_laid_over", "a chunk that is copied while its rows change stays torn",
        RowStream, "_exact", "target[at] = value[inside]", "pass", ("I6",),
    ),
    Mutant(
        "old_values_of_all_epochs", "of a streamed delta only rows changed since the last save have old values kept",
        Tracker, "frozen_interval", "0 if everything else self._low", "self._frozen", ("I6",),
    ),
    Mutant(
        "state_copied_at_the_call", "the dense state is read when it is written, not when the save is called",
        FlatState, "copy", "_copy_leaf(leaf, arena)",
        "StateTensorCopy(dtype_name(leaf.dtype), tuple(leaf.shape), memoryview(leaf.view(torch.uint8).numpy()))", ("I6",),
    ),
    Mutant(
        "a_failed_pack_fails_the_save", "a pack whose write got no answer is named all the same",
        RankWriter, "_put", "    self._repository.store.put(key, finished.parts)\n",
        "    try:\n        self._repository.store.put(key, finished.parts)\n    except CheckpointError:\n        pass\n", ("I1", "READ"),
    ),
    Mutant(
        "epochs_begin_at_a_freeze", "rows changed while a save is in flight carry the mark of that save",
        Tracker, "freeze", "self._epoch += 1", "pass", ("I6",),
    ),
)  # fmt: skip
