"""Trains the example's DLRM on a Criteo file, exports it, and compares what the importers' models predict with what the
trained one does: torch and safetensors into the unsharded module, DCP into one that two ranks share.

It reads exports only with the libraries that they are for.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "examples")]

SHARDINGS = ("table-wise", "row-wise", "column-wise", "mixed")
RANKS = 2
LEARNING_RATE = 0.02


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=8, help="that are predicted")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--max-rows-per-table", type=int, default=100_000)
    parser.add_argument("--shardings", nargs="+", default=SHARDINGS, choices=SHARDINGS)
    arguments = parser.parse_args(argv)
    quiet()
    folder = Path(tempfile.mkdtemp(prefix="incremental-ckpt-exports-"))
    try:
        return compare(arguments, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def quiet() -> None:
    """Nothing of torch, TorchRec and FBGEMM about themselves."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def compare(arguments: argparse.Namespace, folder: Path) -> int:
    import dlrm_model  # noqa: F401 - TorchRec, once for the ranks too
    import torch
    import torch.distributed.checkpoint
    from safetensors.torch import load_file

    ranks = {sharding: start_ranks(arguments, folder, sharding) for sharding in arguments.shardings}
    produce(arguments, folder)
    expected = torch.load(folder / "expected.pt", weights_only=True)
    found = {
        "torch": predict_unsharded(arguments, torch.load(folder / "model.pt", weights_only=True)),
        "safetensors": predict_unsharded(arguments, load_file(folder / "safetensors" / "model.safetensors")),
    }
    for sharding in arguments.shardings:
        found[f"dcp, {RANKS} ranks, {sharding}"] = read_by_ranks(*ranks[sharding], folder, sharding)
    failed = 0
    print(f"{sum(len(p) for p in expected)} rows of {arguments.data.name}, predictions of the trained model and of:")
    for name, predictions in found.items():
        pairs = list(zip(predictions, expected, strict=True))
        same = all(torch.equal(a, b) for a, b in pairs)
        furthest = max(float((a - b).abs().max()) for a, b in pairs)
        failed += not same
        print(f"  {name}: {'equal, bit for bit' if same else f'DIFFER by up to {furthest:.3g}'}", flush=True)
    return 1 if failed else 0


def produce(arguments: argparse.Namespace, folder: Path) -> None:
    """Train with checkpoints, a chain of a base and deltas; predict; export the newest in three formats."""
    import torch
    import torch.distributed as dist
    from dlrm_model import build_model, make_repeatable, start_processes, to_torch

    from incremental_ckpt import Checkpointer, EverySteps, Repository, export, open_store

    device = start_processes()
    make_repeatable(0, 1)
    reader = reader_of(arguments)
    model, optimizer = build_model(reader.table_sizes, arguments.dim, LEARNING_RATE, device)
    every = EverySteps(max(1, arguments.steps // 4))
    with Checkpointer(model, folder / "run", optimizer=optimizer, when=every, kind="consecutive") as checkpointer:
        for step in range(1, arguments.steps + 1):
            optimizer.zero_grad()
            loss, _ = model(to_torch(next(reader), device))
            loss.backward()
            optimizer.step()
            checkpointer.step(step)
        checkpointer.save_checkpoint(arguments.steps).wait()
    torch.save(predictions_of(model, batches_of(arguments)), folder / "expected.pt")
    repository = Repository(open_store(folder / "run"))
    assert len(repository.chain()) > 1
    export(repository, folder / "model.pt", "torch")
    export(repository, folder / "safetensors", "safetensors")
    export(repository, folder / "dcp", "dcp")
    dist.destroy_process_group()


def reader_of(arguments: argparse.Namespace) -> Any:
    from criteo import CriteoReader

    return CriteoReader(
        arguments.data, batch_size=arguments.batch_size, max_rows_per_table=arguments.max_rows_per_table
    )


def batches_of(arguments: argparse.Namespace) -> list[Any]:
    import torch
    from dlrm_model import to_torch

    return [to_torch(batch, torch.device("cpu")) for batch in itertools.islice(reader_of(arguments), arguments.batches)]


def predictions_of(model: Any, batches: Sequence[Any]) -> list[Any]:
    import torch

    model.eval()
    with torch.no_grad():
        return [model(batch)[1][1].clone() for batch in batches]


def predict_unsharded(arguments: argparse.Namespace, state: Any) -> list[Any]:
    import criteo
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.models.dlrm import DLRM, DLRMTrain

    sizes = reader_of(arguments).table_sizes
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=arguments.dim, feature_names=[name])
        for name, rows in zip(criteo.CATEGORICALS, sizes, strict=True)
    ]
    model = DLRMTrain(
        DLRM(
            EmbeddingBagCollection(tables=tables, device=torch.device("cpu")),
            dense_in_features=len(criteo.INTEGERS),
            dense_arch_layer_sizes=[128, 64, arguments.dim],
            over_arch_layer_sizes=[128, 64, 1],
        )
    )
    model.load_state_dict(state)
    return predictions_of(model, batches_of(arguments))


def start_ranks(arguments: argparse.Namespace, folder: Path, sharding: str) -> tuple[list[ForkProcess], Event]:
    """Forked while there is one thread; they begin when they are told that the exports are there."""
    context = multiprocessing.get_context("fork")
    exported = context.Event()
    more = (arguments, sharding, folder, exported)
    ranks = [context.Process(target=consume_dcp, args=(rank, *more), daemon=True) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    return ranks, exported


def read_by_ranks(ranks: Sequence[ForkProcess], exported: Event, folder: Path, sharding: str) -> list[Any]:
    """Each rank predicts a batch in turn, as a distributed model does."""
    import torch

    exported.set()
    for rank in ranks:
        rank.join()
    codes = [rank.exitcode for rank in ranks]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    parts = [torch.load(folder / f"{sharding}-{rank}.pt", weights_only=True) for rank in range(RANKS)]
    return [part for together in zip(*parts, strict=True) for part in together]


def consume_dcp(rank: int, arguments: argparse.Namespace, sharding: str, folder: Path, exported: Event) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from dlrm_model import build_model, make_repeatable

    exported.wait()
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    meeting = f"file://{folder}/meeting-{sharding}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    make_repeatable(1, 1)
    reader = reader_of(arguments)
    model, _ = build_model(reader.table_sizes, arguments.dim, LEARNING_RATE, torch.device("cpu"), sharding)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder / "dcp")
    model.load_state_dict(state)
    torch.save(predictions_of(model, batches_of(arguments)[rank::RANKS]), folder / f"{sharding}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
