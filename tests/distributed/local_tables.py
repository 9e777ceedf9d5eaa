"""Ranks that hold tables of one name which nothing keeps alike. Each rank tells what it saw.

It must not know what any test expects.
"""

from __future__ import annotations

from typing import Any

import torch
from rank_processes import connect
from rank_troubles import Seen, error_of
from torch import nn

from incremental_ckpt import Checkpointer, Repository, Settings, open_store
from incremental_ckpt.compaction import compact

ROWS = 12


class Tables(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.EmbeddingBag(ROWS, 2, mode="sum", sparse=True) for name in names})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(ids).cos().sum() for table in self.tables.values()]).sum()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *rows: int) -> None:
    optimizer.zero_grad()
    model(torch.tensor([[*rows]])).backward()
    optimizer.step()


def opened(model: nn.Module, url: str) -> Checkpointer:
    parameters = [*model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    settings = Settings(vote_timeout=30, low_priority=False)
    return Checkpointer(model, url, optimizer=optimizer, kind="consecutive", settings=settings)


def tables_of_one_name(rank: int, world_size: int, folder: str) -> dict[str, Seen]:
    """Each rank trains a table of its own; the same behind DistributedDataParallel, with the module given or its
    wrapper; tables of which only some ranks have one."""
    connect()
    torch.manual_seed(rank)
    local = Tables("user")
    torch.manual_seed(1)
    replica = nn.parallel.DistributedDataParallel(Tables("user"))
    some = Tables("user") if rank else Tables()
    return {
        "local": error_of(lambda: opened(local, f"{folder}/local")),
        "unwrapped": error_of(lambda: opened(replica.module, f"{folder}/unwrapped")),
        "replica": error_of(lambda: opened(replica, f"{folder}/replica").close()),
        "of one rank": error_of(lambda: opened(some, f"{folder}/some").close()),
    }


def tables_of_each_rank(rank: int, world_size: int, url: str, resume: bool) -> dict[str, Any]:
    """A table with a name of its own on each rank, and one that all hold alike; compacted and resumed."""
    connect()
    torch.manual_seed(rank)
    own = Tables(f"rank{rank}")
    shared = Tables("all")
    model = nn.ModuleDict({"own": own, "shared": nn.parallel.DistributedDataParallel(shared)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model, url, optimizer=optimizer, kind="consecutive", settings=Settings(vote_timeout=30)) as c:
        if resume:
            c.resume_from_checkpoint()
        else:
            for number in (1, 2, 3):
                optimizer.zero_grad()
                for part in model.values():
                    part(torch.tensor([[number, number + 3 * rank]])).backward()
                optimizer.step()
                c.save_checkpoint(number).wait()
            if rank == 0:
                compact(Repository(open_store(url)))
            torch.distributed.barrier()
    return {name.replace(".module", ""): value.numpy() for name, value in model.state_dict().items()}
