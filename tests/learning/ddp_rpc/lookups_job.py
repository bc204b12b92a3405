"""For test_sharding.py: main.py with a server that counts lookups, by number of bags and with or without a graph.

python tests/learning/ddp_rpc/lookups_job.py --world_size 4 --batches 5

It also counts the tables that evaluations see. The updates of the second trainer come late, so that an evaluation that
does not wait for them would see more than one.
"""

import collections
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "ddp_rpc"))
import torch

import hogwild
import main
from glue import launch

seen = collections.Counter()
seen_kinds = []  # of the gradients of the table
evaluated = set()  # versions of the table, which each update counts up


class RecordingShard(hogwild.EmbeddingShard):
    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        seen_kinds.append("sparse" if self.sparse else "dense")

    def look_up(self, ids_I, offsets_B, with_gradient):
        sums_BD = super().look_up(ids_I, offsets_B, with_gradient)
        seen[len(offsets_B), sums_BD.grad_fn is not None] += 1
        if not with_gradient:
            evaluated.add(self.weight._version)
        return sums_BD


class LateOptimizer(hogwild.DistributedOptimizer):
    def step(self, context_id):
        time.sleep(0.2)
        super().step(context_id)


def run_worker(rank, args, job):
    hogwild.EmbeddingShard = RecordingShard
    if rank == 1:
        hogwild.DistributedOptimizer = LateOptimizer
    main.run_worker(rank, args, job)
    assert not torch.distributed.is_initialized()  # as a process group
    if rank == args.world_size - 1:  # the server
        print(f"{seen_kinds.pop()} gradients", flush=True)
        for (bags, graph), times in sorted(seen.items()):
            print(f"{times} lookups of {bags} bags {'with' if graph else 'without'} a graph", flush=True)
        print(f"{len(evaluated)} tables in evaluations", flush=True)


if __name__ == "__main__":
    launch.launch(run_worker, main.parse_args(sys.argv[1:]), main.worker_name)
