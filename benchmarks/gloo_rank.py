"""One rank of a job whose saves are measured: trains intervals, saves a delta after each, tells of them as JSON.

It must not know other jobs; gloo.py starts it with what is asked for as JSON in its argument.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch.distributed as dist  # noqa: E402 - the path comes first
from save import quiet  # noqa: E402
from saving import DELTA, Saves  # noqa: E402
from workload import Training  # noqa: E402


def main() -> int:
    quiet()
    asked = json.loads(sys.argv[1])
    training = Training(rows=asked["rows"], dim=asked["dim"], batch=asked["batch"], share=asked["share"])
    found = []
    # Rank 0 leaves first and removes the folder: all are through with it then.
    first = dist.get_rank() == 0
    with Saves(training, Path(asked["folder"]), remove=first, low_priority=asked["low_priority"]) as saves:
        saves.start()
        for _ in range(asked["saves"]):
            training.interval()
            dist.barrier()
            saved = saves.save(DELTA)
            everyone: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size()
            dist.all_gather_object(everyone, (saved.wall_seconds, saved.durable_seconds))
            found.append(
                {
                    "stall_seconds": max(stall for stall, _ in everyone),
                    "durable_seconds": max(durable for _, durable in everyone),
                    "bytes": saved.event.bytes,
                    "rows": saved.event.rows,
                }
            )
        saves.checkpointer.close()
        dist.barrier()
    training.close()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
