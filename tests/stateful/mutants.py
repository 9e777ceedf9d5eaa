"""Mistakes that an implementer would make, put into the real code one at a time: a line is exchanged for another.

A mistake whose line is no longer in the code is an error: then the mistake is to be made anew in the code as it is.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from dataclasses import dataclass, replace
from typing import Any

import pytest
from mixes import ALONE, BRANCHES, DAMAGED, LATE, PAIRS, TOOLED, Mix

from incremental_ckpt import pruning
from incremental_ckpt.checkpointer import Checkpointer
from incremental_ckpt.persist import Persister
from incremental_ckpt.planning import Planner
from incremental_ckpt.rank_writer import RankWriter
from incremental_ckpt.repository import Repository
from incremental_ckpt.repository.lineage import behind_damaged
from incremental_ckpt.resuming import Resume
from incremental_ckpt.saving import Saver
from incremental_ckpt.snapshot import FlatState
from incremental_ckpt.stream import RowStream
from incremental_ckpt.tracker import Tracker


@dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
        home, function: where it is made: a method of a class, or (without a name) a function.
        right, wrong: the text that is exchanged; it occurs once in the function.
        caught_as: the invariants that notice it, whichever first.
        mix: of the runs in which it matters; None: any.
        events: of a run.
    """

    name: str
    mistake: str
    home: Any
    function: str
    right: str
    wrong: str
    caught_as: tuple[str, ...]
    mix: Mix | None = None
    events: int = 350

    def make(self, patch: pytest.MonkeyPatch) -> None:
        module = sys.modules[self.home.__module__]
        owner, name = (self.home, self.function) if self.function else (module, self.home.__name__)
        original = inspect.getattr_static(owner, name)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.right) == 1, f"{self.right!r} occurs {source.count(self.right)} times in {name}"
        code = compile(
            source.replace(self.right, self.wrong),
            f"<mutant {self.name}>",
            "exec",
            dont_inherit=True,
            flags=_ANNOTATIONS,
        )
        made: dict[str, Any] = {}
        exec(code, module.__dict__, made)
        patch.setattr(owner, name, made[name])


_ANNOTATIONS = __import__("__future__").annotations.compiler_flag
_COMMITTED = "committed and flight.attempt.moves_parent"

MUTANTS = (
    Mutant(
        "marks_given_back",
        "marks are dropped when the save is settled, also when it failed",
        Saver,
        "_settle",
        _COMMITTED,
        "flight.attempt.moves_parent",
        ("I6",),
    ),
    Mutant(
        "failed_base_gives_back",
        "a failed base drops its marks, a failed delta keeps them",
        Saver,
        "_settle",
        _COMMITTED,
        f"flight.attempt.kind == 'base' or {_COMMITTED}",
        ("I6",),
        replace(ALONE, lost_answers=0.05, lost_commits=0.2, fates=("never",), kinds=("full", "consecutive")),
    ),
    Mutant(
        "one_shot_marks_kept",
        "a committed one-shot delta drops its marks although the next delta counts from its parent",
        Saver,
        "_settle",
        _COMMITTED,
        "committed",
        ("I6",),
    ),
    Mutant(
        "resumed_is_next_parent",
        "after a resume deltas count from the base of the chain; the marks are empty",
        Planner,
        "begin_after",
        "source.ref if source else None",
        "resumed[0].ref if source else None",
        ("PARENT", "I6"),
    ),
    Mutant(
        "branch_starts_with_base",
        "after a resume from an older number the first save may be a delta",
        Planner,
        "begin_after",
        " or source.seq != newest_seq",
        "",
        ("PARENT",),
        BRANCHES,
    ),
    Mutant(
        "lineage_of_newest",
        "the lineage is extended from the checkpoint resumed from",
        Planner,
        "begin_after",
        "lineage_after(newest,",
        "lineage_after(source or newest,",
        ("LINEAGE",),
        BRANCHES,
    ),
    Mutant(
        "next_parent_from_newest",
        "the next parent is kept in memory: a put that landed late is overlooked",
        Planner,
        "settle",
        "    self._adopt(verdict.newest)\n",
        "    if verdict.committed is not None:\n        self._adopt(verdict.newest)\n"
        "    elif verdict.newest is not None:\n        self._newest_seq = verdict.newest.seq\n",
        ("PARENT",),
        replace(LATE, kinds=("consecutive",)),
    ),
    Mutant(
        "lineage_of_this_life",
        "a put from before an in-process resume is taken for one of the state resumed to",
        Planner,
        "_adopt",
        "newest.attempt not in self._attempts",
        "False",
        ("LINEAGE", "PARENT", "I6"),
        replace(LATE, lost_commits=0.3, late=0.03, resume_again=0.5, older=0.0, kinds=("consecutive",)),
        800,
    ),
    Mutant(
        "look_after_the_attempt",
        "what the next attempt counts from comes from memory, not from the store",
        Persister,
        "_look",
        "newest = self._repository.newest() if lost else self._repository.newest_in(listing, attempt.seq - 1)",
        "newest = committed",
        ("LIVE", "TOLD"),
    ),
    Mutant(
        "own_late_put_is_ours",
        "a late put of our own is taken for a conflict",
        Repository,
        "commit",
        "winner.job == manifest.job",
        "False",
        ("CONFLICT",),
        LATE,
    ),
    Mutant(
        "behind_a_late_put_of_our_own",
        "a late put of our own holds the number, another job has gone on behind it: never told",
        Persister,
        "_look",
        "error = self._repository.lost_to(newest, attempt.job)",
        "pass",
        ("LIVE",),
        replace(LATE, stall=0.03, older=0.0),
    ),
    Mutant(
        "of_two_jobs_that_find_nothing",
        "a job that found an empty store goes on behind whatever is there at its first save",
        Checkpointer,
        "resume_from_checkpoint",
        "self._saver.planner.begin_fresh(None)",
        "pass",
        ("LINEAGE",),
        replace(ALONE, stall=0.03, rival=0.05),
    ),
    Mutant(
        "repo_json_first",
        "only rank 0 makes sure of repo.json before it writes",
        Persister,
        "persist",
        "self._repository.create()",
        "self._rank or self._repository.create()",
        ("ERROR",),
        replace(PAIRS, crash=0.02),
    ),
    Mutant(
        "one_vote_of_a_rank",
        "a rank whose vote got no answer votes again, otherwise",
        Persister,
        "persist",
        "may_report = False  # a vote whose",
        "may_report = True  # a vote whose",
        ("I2",),
        PAIRS,
    ),
    Mutant(
        "votes_are_awaited",
        "rank 0 commits although another rank has failed",
        Persister,
        "_vote_of",
        'vote.vote != "ok"',
        "False",
        ("I1", "I6"),
        PAIRS,
    ),
    Mutant(
        "fallback_by_ancestors",
        "the fallback is the next lower number",
        behind_damaged,
        "",
        "set(ancestors(repository.manifest(seq).lineage, seq))",
        "set(range(seq))",
        ("READ",),
        replace(DAMAGED, damage=0.01, crash=0.03, kinds=("full",)),
        500,
    ),
    Mutant(
        "history_in_lineage",
        "the parent is the only link to ancestors, and a base has none",
        behind_damaged,
        "",
        "set(ancestors(repository.manifest(seq).lineage, seq))",
        "{p.seq for p in [repository.manifest(seq).parent] if p}",
        ("READ",),
        DAMAGED,
    ),
    Mutant(
        "all_ranks_hear_of_a_failure",
        "a rank whose save failed says so before a resume, the others go on to resume",
        Saver,
        "settle",
        "self._take_in(reports[0])",
        "self._take_in(reports[0]) if self._rank == 0 else self._forget_flight()",
        ("TOLD", "I6", "HANG"),
        replace(PAIRS, lost_commits=0.2, resume_again=0.4),
    ),
    Mutant(
        "marker_before_reading",
        "the resume marker is written after the rows are read",
        Resume,
        "_marked",
        "self._repository.write_resume_marker",
        "if self._markers: self._load(_Pick(seq, seq, False, None))\n    self._repository.write_resume_marker",
        ("MARKER",),
    ),
    Mutant(
        "preimages_until_copied",
        "old values are kept only for rows of chunks already streamed",
        RowStream,
        "take",
        "rows = rows[int(np.searchsorted(rows.numpy(), watermark)) :]",
        "rows = rows[: int(np.searchsorted(rows.numpy(), watermark))]",
        ("I6",),
    ),
    Mutant(
        "old_values_override",
        "spilled old values come before what was read from the table",
        RankWriter,
        "vote",
        "(*entries, *overriding)",
        "(*overriding, *entries)",
        ("I6",),
    ),
    Mutant(
        "old_values_laid_over",
        "a chunk that is copied while its rows change stays torn",
        RowStream,
        "_exact",
        "target[at] = value[inside]",
        "pass",
        ("I6",),
    ),
    Mutant(
        "old_values_of_all_epochs",
        "of a streamed delta only rows changed since the last save have old values kept",
        Tracker,
        "frozen_interval",
        "0 if everything else self._low",
        "self._frozen",
        ("I6",),
    ),
    Mutant(
        "state_copied_at_the_call",
        "the dense state is read when it is written, not when the save is called",
        FlatState,
        "copy",
        "_copy_leaf(leaf, arena)",
        "StateTensorCopy(dtype_name(leaf.dtype), tuple(leaf.shape), memoryview(leaf.view(torch.uint8).numpy()))",
        ("I6", "I1"),
    ),
    Mutant(
        "a_failed_pack_fails_the_save",
        "a pack whose write got no answer is named all the same",
        RankWriter,
        "_put",
        "    self._repository.store.put(key, finished.parts)\n",
        "    try:\n        self._repository.store.put(key, finished.parts)\n    except Exception:\n        pass\n",
        ("I1", "READ"),
    ),
    Mutant(
        "epochs_begin_at_a_freeze",
        "rows changed while a save is in flight carry the mark of that save",
        Tracker,
        "freeze",
        "self._epoch += 1",
        "pass",
        ("I6",),
    ),
    Mutant(
        "a_forgotten_checkpoint_is_not_damaged",
        "a resume that a prune has overtaken takes what is missing for damage",
        Resume,
        "_candidates",
        "if (now.gone, now.bases) != (listing.gone, listing.bases):",
        "if False:",
        ("READ",),
        replace(TOOLED, older=0.6, rival=0.03),
    ),
    Mutant(
        "markers",
        "a prune ignores resume markers",
        pruning._Survey,
        "plan",
        "if seqs[-1] <= marker.newest",
        "if False",
        ("KEEP",),
        replace(TOOLED, older=0.6),
    ),
    Mutant(
        "next_parent_kept",
        "a prune forgets what the next delta counts from",
        pruning._Survey,
        "plan",
        "used.add(newest.next_parent.seq)",
        "pass",
        ("I1", "TOLD"),
        replace(TOOLED, compact=0.05, prune=0.05, crash=0.0, kinds=("one-shot",), tool_speeds=(99,)),
        800,
    ),
    Mutant(
        "live_compaction_kept",
        "a prune takes the packs of a running compaction for orphans",
        pruning._Survey,
        "_is_orphan",
        "if seq not in self._listing.bases:\n        return not",
        "if seq not in self._listing.bases:\n        return True or not",
        ("I1",),
        TOOLED,
    ),
    Mutant(
        "gone_first",
        "a prune deletes equivalents before it says that the checkpoint is gone",
        pruning._execute,
        "",
        "    floor = 0\n",
        "    floor = 0\n    for seq, key in plan.equivalents:\n        _delete(repository, [key], key, done)\n",
        ("I1",),
        TOOLED,
        800,
    ),
)
