"""Trains TorchRec's DLRM on Criteo click logs with incremental checkpoints, and resumes by itself.

    python examples/dlrm_criteo.py --data train.txt --store /tmp/run --steps 1000 --save-every 100
    torchrun --nproc-per-node 2 examples/dlrm_criteo.py --data train.txt --store /tmp/run --sharding row-wise

Kill it whenever you like and start it again with the same arguments: it goes on from the newest checkpoint and ends
with the `digest` line of a run that was never interrupted. What that takes is fixed here: the seed; the number of
threads (--threads: one and two may add up in different orders); deterministic kernels; DDP settings under which a
resumed run adds up gradients as before (`static_graph=False, find_unused_parameters=True`); a reader whose position is
part of the checkpoint. What is left to you: the same number of processes and the same library versions all along.

Without --data a synthetic file is generated once and kept; without --store nothing is saved. Exit codes: 0 finished,
2 bad arguments or a bad data file (found before training starts), 3 the checkpoints cannot be read or written.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import synthetic
from criteo import CriteoError, CriteoReader

from incremental_ckpt.errors import CheckpointError

EXIT_BAD_INPUT = 2
EXIT_CHECKPOINT = 3
CODECS = ("raw", "fp16", "bf16", "int8", "int4", "int3", "int2", "auto")
SHARDINGS = ("planner", "table-wise", "row-wise", "column-wise", "table-row-wise", "data-parallel", "mixed")
KINDS = ("full", "one-shot", "consecutive", "intermittent")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="Criteo TSV (Kaggle layout) or parquet; default: a synthetic file")
    parser.add_argument(
        "--store", metavar="URL", help="where checkpoints go: a folder or s3://bucket/prefix; default: nowhere"
    )
    parser.add_argument("--steps", type=_positive, default=1000, help="train up to this step")
    parser.add_argument("--save-every", type=_positive, default=100, metavar="K", help="steps between two checkpoints")
    parser.add_argument("--codec", choices=CODECS, default="raw", help="of table rows; only raw resumes bit for bit")
    parser.add_argument("--kind", choices=KINDS, default="intermittent", help="which checkpoints carry all rows")
    parser.add_argument("--batch-size", type=_positive, default=256, help="samples per step and process")
    parser.add_argument("--embedding-dim", type=_positive, default=32)
    parser.add_argument("--max-rows-per-table", type=_positive, default=200_000)
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of tables and dense layers")
    parser.add_argument(
        "--sharding",
        choices=SHARDINGS,
        default="planner",
        help="how tables are spread over the processes; may change from one start to the next",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=_positive, default=1, help="CPU threads per process; part of what makes runs repeatable"
    )
    parser.add_argument("--synthetic-rows", type=_positive, default=100_000, help="length of the synthetic file")
    parser.add_argument(
        "--cache", type=Path, help="where the synthetic file is kept; default: the system's temporary folder"
    )
    parser.add_argument("--save-log", type=Path, metavar="FILE", help="append a JSON line for every save")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        reader = CriteoReader(
            arguments.data or synthetic_file(arguments, rank),
            batch_size=arguments.batch_size,
            max_rows_per_table=arguments.max_rows_per_table,
            keep=arguments.steps * arguments.batch_size * world_size,
            rank=rank,
            world_size=world_size,
        )
        return train(arguments, reader)
    except CriteoError as error:
        return _fail(str(error), EXIT_BAD_INPUT)
    except CheckpointError as error:
        return _fail(f"{type(error).__name__}: {error}", EXIT_CHECKPOINT)


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def synthetic_file(arguments: argparse.Namespace, rank: int) -> Path:
    folder = arguments.cache or Path(tempfile.gettempdir()) / f"incremental-ckpt-{getpass.getuser()}"
    path: Path = folder / f"criteo-synthetic-{arguments.synthetic_rows}-{arguments.seed}.tsv"
    if rank == 0 and not path.exists():
        print(f"generating {arguments.synthetic_rows} synthetic rows: {path}", file=sys.stderr)
        synthetic.write_file(path, arguments.synthetic_rows, arguments.seed)
    while not path.exists():  # it appears whole; the processes are not connected yet
        time.sleep(0.2)
    return path


def train(arguments: argparse.Namespace, reader: CriteoReader) -> int:
    _quiet()
    # Loading torch and TorchRec takes seconds: a bad file is refused before.
    import torch.distributed as dist
    from digest import digest
    from dlrm_model import build_model, make_repeatable, start_processes, to_torch
    from rich import print as show
    from saves import SaveLog, table_of
    from tqdm import tqdm

    device = start_processes()
    make_repeatable(arguments.seed, arguments.threads)
    model, optimizer = build_model(
        reader.table_sizes, arguments.embedding_dim, arguments.lr, device, arguments.sharding
    )
    leader = dist.get_rank() == 0
    # A row is its float32 weights and one float32 of row-wise Adagrad.
    log = SaveLog(sum(reader.table_sizes) * (arguments.embedding_dim + 1) * 4, arguments.save_log)

    with contextlib.ExitStack() as stack:
        checkpointer, done = None, 0
        if arguments.store:
            from incremental_ckpt import Checkpointer, EverySteps

            checkpointer = stack.enter_context(
                Checkpointer(
                    model,
                    arguments.store,
                    optimizer=optimizer,
                    state={"reader": reader},
                    when=EverySteps(arguments.save_every),
                    kind=arguments.kind,
                    codec=arguments.codec,
                    busy="wait",  # every run has its checkpoints at the same steps
                    on_event=log,
                )
            )
            progress = checkpointer.resume_from_checkpoint()
            done = progress.step if progress else 0
        if leader:
            print(f"{'resumed at' if done else 'starting from'} step {done}", file=sys.stderr, flush=True)

        saved = None
        interval = 0.5 if sys.stderr.isatty() else 5
        steps = tqdm(
            range(done + 1, arguments.steps + 1),
            total=arguments.steps,
            initial=done,
            unit="step",
            disable=not leader,
            mininterval=interval,
        )
        for step in steps:
            batch = to_torch(next(reader), device)
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            if checkpointer:
                saved = checkpointer.step(step, epoch=reader.epoch, loss=loss.detach())
                if step == arguments.steps and not saved:
                    checkpointer.save_checkpoint(step, epoch=reader.epoch, loss=loss.detach())
            if step % 20 == 0:
                steps.set_postfix_str(f"epoch {reader.epoch}, loss {loss.item():.4f}{log.latest()}", refresh=False)

    if leader and log.saves:
        show(table_of(log.saves))
    final = digest(model, optimizer)
    dist.destroy_process_group()
    if leader:
        print(f"digest {final}", flush=True)
    return 0


def _quiet() -> None:
    """TorchRec, FBGEMM and DDP warn of much that is meant; warnings of incremental_ckpt stay."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", module=r"torch|torchrec|fbgemm_gpu|tensordict|torchmetrics")
    warnings.filterwarnings("ignore", message=".*ShardedTensor")
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    logging.getLogger("incremental_ckpt").setLevel(logging.WARNING)  # the progress bar and the table tell of the saves
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
