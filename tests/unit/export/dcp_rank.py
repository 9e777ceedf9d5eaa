"""A rank that loads a DCP directory into tables that two ranks share, and compares them with the whole ones.

It must not know who wrote the directory.
"""

from __future__ import annotations

from pathlib import Path


def load_and_compare(rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh, zeros

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.load(folder / "expected.pt", weights_only=True)
    placements = {"tables.bag.weight": [Shard(0)], "tables.small.weight": [Shard(1)]}
    found = {
        name: zeros(*tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements[name])
        if name in placements
        else torch.zeros_like(tensor)
        for name, tensor in whole.items()
    }
    assert placements.keys() < whole.keys()
    dcp.load(found, checkpoint_id=folder / "out")
    for name, tensor in whole.items():
        mine = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        assert torch.equal(mine, tensor), name
    dist.destroy_process_group()
