"""What the ranks tell each other when they meet, and what follows from it: the same on every rank, since all see the
same reports.

It must not know how they meet, nor how anything is saved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from incremental_ckpt import errors
from incremental_ckpt.errors import CheckpointError, MismatchError, SaveError
from incremental_ckpt.model import CheckpointRef, Shard
from incremental_ckpt.rank_writer import Attempt

Report = dict[str, Any]

_NAMED = 8


def model_report(
    shards: Sequence[Shard],
    shared: Mapping[str, Any],
    objects: Sequence[str],
    version: str,
    *,
    replicated: Collection[str] | None = None,
) -> Report:
    """What must agree before anything is saved.

    Args:
        shards: of this rank.
        shared: the shapes of replicated parameters by name.
        replicated: the tables that all ranks hold alike; None: nobody has looked.
    """
    tables = {
        s.table: [s.table_rows, s.table_cols, [[f.name, f.dtype, f.width == s.cols] for f in s.fields]] for s in shards
    }
    held: dict[str, int] = {}
    for s in shards if replicated is not None else ():
        held[s.table] = held.get(s.table, 0) + s.rows * s.cols * (s.table not in (replicated or ()))
    digest = hashlib.sha256(repr(sorted((k, list(v)) for k, v in shared.items())).encode()).hexdigest()
    dense = [len(shared), sum(math.prod(v) for v in shared.values()), digest]
    return {
        "what": "open", "version": version, "tables": tables, "held": held, "dense": dense, "objects": sorted(objects),
    }  # fmt: skip


def check_same_call(reports: Sequence[Report]) -> None:
    """Raises SaveError where ranks met in different calls or at different steps."""
    first = reports[0]
    for rank, report in enumerate(reports):
        if (report["what"], report.get("step")) != (first["what"], first.get("step")):
            told = "; ".join(f"rank {r}: {p['what']} at step {p.get('step')}" for r, p in enumerate(reports))
            raise SaveError(
                f"the ranks are not in the same call (rank {rank} differs from rank 0): {told}. All ranks call the "
                "checkpointer at the same steps, in the same order. Nothing was saved"
            )


def check_same_model(reports: Sequence[Report]) -> None:
    """Raises MismatchError where ranks have different models or versions of the library, on every rank."""
    check_same_call(reports)
    first = reports[0]
    known: dict[str, tuple[int, Any]] = {}
    for rank, report in enumerate(reports):
        for name, what in (
            ("version", "run different versions of incremental_ckpt"),
            ("objects", "have registered different state objects"),
            ("dense", "hold different replicated parameters"),
        ):
            if report.get(name) != first.get(name):
                raise MismatchError(
                    f"ranks 0 and {rank} {what} ({_shown(name, first)} and {_shown(name, report)}); nothing was written"
                )
        for table, facts in report["tables"].items():
            other, theirs = known.setdefault(table, (rank, facts))
            if theirs != facts:
                raise MismatchError(
                    f"table {table} is {_table(theirs)} on rank {other} and {_table(facts)} on rank {rank}; nothing "
                    "was written"
                )
    for table, (_, (rows, cols, _)) in known.items():
        _check_held_once(table, rows * cols, [report.get("held", {}).get(table, 0) for report in reports])


def _check_held_once(table: str, size: int, held: Sequence[int]) -> None:
    """Raises MismatchError where ranks hold more of a table than there is, and nothing keeps it alike on them: a reader
    of all ranks, such as a compaction, would take some rows from one and some from another.

    Args:
        size, held: elements of the table, and how many of them each rank holds as its own.
    """
    if sum(held) <= size:
        return
    ranks = [str(rank) for rank, count in enumerate(held) if count]
    shown = ", ".join(ranks[:_NAMED]) + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")
    raise MismatchError(
        f"table {table} is held by ranks {shown}, more of it than there is, and nothing is known to keep it alike on "
        "them. If all ranks train one table, give the Checkpointer the DistributedDataParallel module itself (not its "
        ".module), or shard it (DistributedModelParallel). If each rank trains its own, give the tables names of their "
        'own, as in nn.ModuleDict({f"rank{rank}": table}). Nothing was written'
    )


def _shown(name: str, report: Report) -> str:
    if name != "dense":
        return str(report.get(name))
    count, numbers, digest = report["dense"]
    return f"{count} with {numbers} numbers in all, names and shapes {digest[:8]}"


def _table(facts: Sequence[Any]) -> str:
    rows, cols, fields = facts
    return f"{rows} x {cols} with {', '.join(f'{name} ({dtype})' for name, dtype, _ in fields)}"


def written_error(error: Exception | None) -> list[str] | None:
    if error is None or isinstance(error, CheckpointError):
        return None if error is None else [type(error).__name__, str(error)]
    # What a caller's state_dict() or load_state_dict() raises; the rank itself raises it as it is.
    return [CheckpointError.__name__, f"{type(error).__name__}: {error}"]


def first_error(reports: Sequence[Report], rank: int) -> CheckpointError | None:
    """The error that some rank reports, as it is to be raised on this one."""
    for reporter, report in enumerate(reports):
        if report.get("error") is not None:
            kind, text = report["error"]
            where = "" if reporter == rank or len(reports) == 1 else f"on rank {reporter}: "
            return make_error(kind, f"{where}{text}")
    return None


def make_error(kind: str, text: str) -> CheckpointError:
    """The error of a class known by name; CorruptionError without its key, which the text names."""
    if kind == "CorruptionError":
        return errors.CorruptionError(text, key="")
    made = getattr(errors, kind, SaveError)
    return made(text) if isinstance(made, type) and issubclass(made, CheckpointError) else SaveError(text)


def written_plan(attempt: Attempt) -> dict[str, Any]:
    """What the other ranks need of rank 0's plan."""
    return {
        "seq": attempt.seq, "attempt": attempt.attempt, "kind": attempt.kind, "job": attempt.job,
        "parent": _written_ref(attempt.parent), "next_parent": _written_ref(attempt.next_parent),
    }  # fmt: skip


def read_plan(plan: Mapping[str, Any], *, step: int) -> Attempt:
    return Attempt(
        seq=plan["seq"], attempt=plan["attempt"], kind=plan["kind"], job=plan["job"],
        parent=_read_ref(plan["parent"]), next_parent=_read_ref(plan["next_parent"]),
        step=step, epoch=None, loss=None, metrics={}, lineage=(), environment={},
    )  # fmt: skip


def _written_ref(ref: CheckpointRef | None) -> list[Any] | None:
    return None if ref is None else [ref.seq, ref.digest]


def _read_ref(ref: Sequence[Any] | None) -> CheckpointRef | None:
    return None if ref is None else CheckpointRef(ref[0], ref[1])
