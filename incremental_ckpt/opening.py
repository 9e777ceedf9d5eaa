"""The first meeting of the ranks: all open the store for the same model, or all are told why one could not.

It must not know how ranks meet, nor how stores and adapters are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from incremental_ckpt.agreement import (
    Report,
    check_same_call,
    check_same_model,
    first_error,
    model_report,
    written_error,
)
from incremental_ckpt.coordinator import Coordinator
from incremental_ckpt.format.layout import new_id
from incremental_ckpt.model import ModelAdapter
from incremental_ckpt.repository import Repository
from incremental_ckpt.version import __version__


@dataclass(frozen=True)
class Opened:
    """What this rank has made, and what the ranks have agreed on.

    Attributes:
        job: rank 0's name for it.
        tables: of all ranks.
    """

    repository: Repository
    adapter: ModelAdapter
    job: str
    tables: frozenset[str]


def open_together(
    ranks: Coordinator, make: Callable[[], tuple[Repository, ModelAdapter]], objects: Collection[str]
) -> Opened:
    """Make repository and adapter here, once all ranks have made theirs for the same model.

    Args:
        objects: names of the state objects.

    Raises:
        MismatchError: the models differ.
        Exception: what some rank could not make; on every rank.
    """
    report: Report = {"what": "open"}
    made: tuple[Repository, ModelAdapter] | None = None
    failure: Exception | None = None
    try:
        made = make()
        report = _report(made[1], objects)
    except Exception as cause:  # whatever it is, the other ranks are to hear of it
        failure = cause
    report["error"] = written_error(failure)
    report["job"] = new_id() if ranks.rank == 0 else None  # reports that are alike travel once
    reports = ranks.meet(report)
    check_same_call(reports)
    if (error := failure or first_error(reports, ranks.rank)) is not None:
        raise error
    check_same_model(reports)
    assert made is not None
    return Opened(*made, job=reports[0]["job"], tables=frozenset(name for each in reports for name in each["tables"]))


def _report(adapter: ModelAdapter, objects: Collection[str]) -> Report:
    state = adapter.state()
    replicated = state.get("replicated", ())
    shared = {n: t.shape for n, t in state["dense"].items() if n in replicated}
    tables = adapter.tables()
    return model_report(
        [t.shard for t in tables], shared, list(objects), __version__,
        replicated={t.shard.table for t in tables if t.replicated},
    )  # fmt: skip
