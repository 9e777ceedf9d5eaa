"""Measures saves on a machine with a GPU, in one table: marks, gather, copy to the host, stall, overhead, exactness.

It needs no network, TorchRec or FBGEMM, and takes under 4 minutes. It must not know how a save works beyond its parts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402 - the path comes first
from gpu_model import GpuTraining  # noqa: E402
from rows import Row, Target, quartiles, ratio_row  # noqa: E402
from timing import rounds_of, seconds_of  # noqa: E402

from incremental_ckpt import Checkpointer, EverySteps, SaveHandle  # noqa: E402
from incremental_ckpt.adapters import adapt  # noqa: E402
from incremental_ckpt.model import Table  # noqa: E402
from incremental_ckpt.snapshot import HostArena, RowCopies, copied_bytes  # noqa: E402
from incremental_ckpt.tracker import Tracker  # noqa: E402

_BLOCK = 16
_NEVER = EverySteps(1 << 40)
_MEASURE = "GPU"


@dataclass(frozen=True)
class Check:
    """One training on one device.

    Attributes:
        folder: an empty one for checkpoints.
        repeats, budget: as of a Plan.
    """

    training: GpuTraining
    folder: Path
    repeats: int
    budget: float

    @property
    def device(self) -> torch.device:
        return self.training.device

    def seconds_of(self, action: Callable[[], object]) -> float:
        """Until the device is through with it."""
        self.finish()

        def through() -> None:
            action()
            self.finish()

        return seconds_of(through)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rounds(self, play: Callable[[], tuple[float, ...]]) -> list[tuple[float, ...]]:
        play()
        return rounds_of(play, self.repeats, self.budget)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: skipped, PyTorch sees no GPU on this machine (--device cpu --tiny runs the same code)")
        return 0
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=arguments.store, prefix="gpu-check-") as folder:
        rows, facts = run(arguments, Path(folder))
    print(table(rows, facts))
    print(f"{time.perf_counter() - begun:.0f} s in all")
    if arguments.out:
        result = {"created": facts.pop("created"), "conditions": facts, "rows": [row.as_json() for row in rows]}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tables", choices=("auto", "torch", "fbgemm"), default="auto", help="whose embeddings")
    parser.add_argument("--rows", type=int, default=5_200_000, help="of all 26 tables")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--share", type=float, default=0.02, help="of the rows that change in an interval")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds, then a measure begins no more rounds")
    parser.add_argument("--tiny", action="store_true", help="a size that takes seconds on a CPU")
    parser.add_argument(
        "--store", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints go meanwhile"
    )
    parser.add_argument("--out", type=Path, help="a result for benchmarks/results")
    arguments = parser.parse_args(argv)
    if arguments.tiny:
        arguments.rows, arguments.dim, arguments.batch, arguments.repeats, arguments.budget = 26_000, 8, 32, 2, 0.0
    return arguments


def run(arguments: argparse.Namespace, folder: Path) -> tuple[list[Row], dict[str, object]]:
    from conditions import conditions

    device = torch.device(arguments.device)
    fbgemm = arguments.tables == "fbgemm" or (arguments.tables == "auto" and find_spec("fbgemm_gpu") is not None)
    facts = {"created": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), **conditions(folder)}
    training = GpuTraining(
        device, fbgemm=fbgemm, rows=arguments.rows, tables=26, dim=arguments.dim, batch=arguments.batch,
        share=arguments.share,
    )  # fmt: skip
    training.interval()  # an optimizer makes its state at its first step
    check = Check(training, folder, arguments.repeats, arguments.budget)
    facts |= {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cuda": torch.version.cuda or "none", "tables_of": training.tables.name, "rows": arguments.rows,
        "dim": arguments.dim, "batch": arguments.batch, "share": arguments.share,
    }  # fmt: skip
    rows = [*measure_steps(check), *measure_copies(check), *measure_saves(check), measure_exactness(check)]
    return rows, facts


def measure_steps(check: Check) -> list[Row]:
    """Blocks of steps, watched and not in turn; then marks and scan alone, which are on the device."""
    training = check.training
    adapter = adapt(training.model, training.optimizer)
    tracker = Tracker(adapter.tables())

    def block() -> float:
        return check.seconds_of(lambda: [training.step() for _ in range(_BLOCK)]) / _BLOCK

    def watched() -> float:
        adapter.watch(tracker.mark, tracker.mark_all)
        try:
            return block()
        finally:
            adapter.unwatch()

    steps = check.rounds(lambda: (watched(), block()))
    ids = torch.randint(training.table_rows // 26, (1 << 16,), device=check.device)
    flags = torch.zeros(tracker.map_bytes, dtype=torch.uint8, device=check.device)

    def scan() -> float:
        def freeze() -> None:
            tracker.freeze()
            tracker.give_back()

        return check.seconds_of(freeze)

    alone = check.rounds(
        lambda: (
            check.seconds_of(lambda: tracker.mark(0, ids)),
            check.seconds_of(lambda: flags.index_fill_(0, ids, 1)),
            scan(),
            check.seconds_of(flags.clone),
        )
    )
    return [
        ratio_row(
            _MEASURE, "a step with the tracker / without", [(w, b) for w, b in steps], Target("at most", 1.01),
            watched_seconds=_median(steps, 0), bare_seconds=_median(steps, 1), steps_per_block=_BLOCK,
        ),
        ratio_row(
            _MEASURE, "marking 65,536 ids / one bare index_fill_ of them", [(m, b) for m, b, _, _ in alone],
            mark_seconds=_median(alone, 0), bare_seconds=_median(alone, 1),
        ),
        ratio_row(
            _MEASURE, "finding the marked rows / copying the map once on the device", [(s, c) for _, _, s, c in alone],
            scan_seconds=_median(alone, 2), copy_seconds=_median(alone, 3), map_bytes=tracker.map_bytes,
        ),
    ]  # fmt: skip


def measure_copies(check: Check) -> list[Row]:
    """The gather on the device, and the copy to the host behind it on a side stream, each against a bare copy."""
    training = check.training
    tables, rows = _changed_rows(check)
    nbytes = copied_bytes(tables, rows)
    arena = HostArena(pinned=check.device.type == "cuda")
    arena.reserve(nbytes)
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=check.device)
    other = torch.zeros_like(on_device)
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=check.device.type == "cuda")
    copies: list[RowCopies] = []

    def gather_and_copy() -> None:
        arena.reserve(nbytes)
        copies[:] = [RowCopies(tables, rows, arena)]

    def arrive() -> None:
        for _ in copies[0].packfuls(1 << 25, 1 << 23):
            pass

    def gather() -> None:
        for table, ids in zip(tables, rows, strict=True):
            for live in table.tensors.values():
                live.detach().index_select(0, ids)

    def step_beside() -> float:
        gather_and_copy()
        begun = time.perf_counter()
        training.step()
        if check.device.type == "cuda":
            torch.cuda.current_stream(check.device).synchronize()
        seconds = time.perf_counter() - begun
        arrive()
        return seconds

    def whole() -> float:
        def save() -> None:
            gather_and_copy()
            arrive()

        return check.seconds_of(save)

    found = check.rounds(
        lambda: (
            check.seconds_of(gather),
            check.seconds_of(lambda: other.copy_(on_device)),
            whole(),
            check.seconds_of(lambda: host.copy_(on_device, non_blocking=True)),
            step_beside(),
            check.seconds_of(training.step),
        )
    )
    link = _median(found, 3)
    return [
        ratio_row(
            _MEASURE, "bare gather on the device / device-to-device copy of as many bytes",
            [(f[0], f[1]) for f in found],
            gather_seconds=_median(found, 0), copy_seconds=_median(found, 1), copied_bytes=nbytes,
            rows=sum(len(r) for r in rows),
        ),
        ratio_row(
            _MEASURE, "share of PCIe reached: one bare copy to pinned memory / gather and copy until all is there",
            [(f[3], f[2]) for f in found],
            bare_bytes_per_second=nbytes / link, bytes_per_second=nbytes / _median(found, 2),
            all_there_seconds=_median(found, 2),
        ),
        ratio_row(
            _MEASURE, "a step issued right behind the copy, until it is done / a step alone",
            [(f[4], f[5]) for f in found], beside_seconds=_median(found, 4), bare_seconds=_median(found, 5),
        ),
    ]  # fmt: skip


def measure_saves(check: Check) -> list[Row]:
    """The stall as the training stream sees it: from the call until what it had to wait for is done."""
    training = check.training
    tables, rows = _changed_rows(check)
    nbytes = copied_bytes(tables, rows)
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=check.device)
    other = torch.zeros_like(on_device)
    with Checkpointer(
        training.model, check.folder / "saves", optimizer=training.optimizer, when=_NEVER, kind="consecutive"
    ) as checkpointer:

        def save(kind: str | None) -> tuple[float, float, SaveHandle]:
            check.finish()
            begun = time.perf_counter()
            handle = checkpointer.save_checkpoint(training.steps, kind=kind)  # type: ignore[arg-type]
            called = time.perf_counter()
            if check.device.type == "cuda":
                torch.cuda.current_stream(check.device).synchronize()
            return time.perf_counter() - begun, called - begun, handle

        save("full")[2].wait()

        def play() -> tuple[float, float, float]:
            training.interval()
            stall, call, handle = save(None)
            handle.wait()
            return stall, check.seconds_of(lambda: other.copy_(on_device)), call

        found = check.rounds(play)
        base_stall, _, base = save("full")
        base.wait()
        training.interval()
        save(None)[2].wait()
    return [
        ratio_row(
            _MEASURE, "stall of a raw delta / device-to-device copy of as many bytes", [(s, c) for s, c, _ in found],
            stall_seconds=_median(found, 0), call_seconds=_median(found, 2), copy_seconds=_median(found, 1),
            copied_bytes=nbytes,
        ),
        ratio_row(
            _MEASURE, "stall of a base / of a delta", [(base_stall, s) for s, _, _ in found], Target("at most", 1.0),
            base_stall_seconds=base_stall, delta_stall_seconds=_median(found, 0),
        ),
        _resumed_row(check),
    ]  # fmt: skip


def _resumed_row(check: Check) -> Row:
    """The store holds a base and a delta of what the model is now."""
    other = check.training.untrained()
    other.interval()
    with Checkpointer(other.model, check.folder / "saves", optimizer=other.optimizer, when=_NEVER) as checkpointer:
        seconds = check.seconds_of(checkpointer.resume_from_checkpoint)
    pairs = [
        (mine, theirs)
        for ours, resumed in zip(_tables(check.training), _tables(other), strict=True)
        for mine, theirs in zip(ours.tensors.values(), resumed.tensors.values(), strict=True)
    ]
    alike = sum(torch.equal(mine, theirs) for mine, theirs in pairs)
    return ratio_row(
        _MEASURE, "tables and optimizer states that are the same after a resume / all", [(alike, len(pairs))],
        Target("at least", 1.0), resume_seconds=seconds,
    )  # fmt: skip


def _tables(training: GpuTraining) -> Sequence[Table]:
    return adapt(training.model, training.optimizer).tables()


def measure_exactness(check: Check) -> Row:
    """Rows copied while the next update is already queued are those of the call: 1 is every byte."""
    tables, rows = _changed_rows(check)
    arena = HostArena(pinned=check.device.type == "cuda")
    arena.reserve(copied_bytes(tables, rows))
    check.finish()
    wanted = [live.detach().index_select(0, ids).cpu() for t, ids in zip(tables, rows, strict=True)
              for live in t.tensors.values()]  # fmt: skip
    copies = RowCopies(tables, rows, arena)
    check.training.interval()  # changes each of these rows
    parts = [part for packful in copies.packfuls(1 << 25, 1 << 40) for part in packful]
    found = [field for part in parts for field in part.fields]
    check.finish()
    alike = sum(
        int((torch.from_numpy(f).reshape(-1) == w.reshape(-1).view(torch.uint8)).sum())
        for f, w in zip(found, wanted, strict=True)
    )
    every = sum(w.nbytes for w in wanted)
    return ratio_row(
        _MEASURE, "bytes of a snapshot that are those of the call, though training went on / all",
        [(alike, every)], Target("at least", 1.0), compared_bytes=every,
    )  # fmt: skip


def _changed_rows(check: Check) -> tuple[Sequence[Table], list[torch.Tensor]]:
    """Of one interval, as the tracker finds them."""
    training = check.training
    adapter = adapt(training.model, training.optimizer)
    tracker = Tracker(adapter.tables())
    adapter.watch(tracker.mark, tracker.mark_all)
    try:
        training.interval()
    finally:
        adapter.unwatch()
    found = tracker.freeze()
    return adapter.tables(), [rows for rows in found if rows is not None]


def _median(found: Sequence[tuple[float, ...]], place: int) -> float:
    return quartiles([each[place] for each in found])[1]


def table(rows: Sequence[Row], facts: dict[str, object]) -> str:
    lines = [
        f"{facts['device']}, {facts['tables_of']}: {facts['rows']:,} rows, dim {facts['dim']}, "
        f"{facts['share']:.1%} changed; PyTorch {torch.__version__}, CUDA {facts['cuda']}",
        "",
        f"{'measured':>9}  {'quartiles':>15}  {'target':>12}  what",
    ]
    for row in rows:
        target = "" if row.target is None else f"{row.target.bound} {row.target.value:g}"
        missed = "" if row.reached in (None, True) else "  MISSED"
        spread = f"{row.quartiles[0]:.3f} – {row.quartiles[1]:.3f}"
        lines.append(f"{row.ratio:9.3f}  {spread:>15}  {target:>12}  {row.what}{missed}")
        lines.append(f"{'':42}  {', '.join(f'{key} {_number(value)}' for key, value in row.details.items())}")
    return "\n".join(lines)


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    sys.exit(main())
