"""A minimal job that goes on without lost workers (--on_lost continue), to test the glue without a scenario.

    python tests/harness/counting_main.py [--enough N] [--fail R] [flags that all packages share]

Each worker (rank >= 1) calls a function of rank 0 N times. Worker R raises an error after 20 calls. Rank 0 has done
its work when every living worker has made its calls.
"""

import pathlib
import sys
import threading

PACKAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "rl_rpc"
sys.path.insert(0, str(PACKAGE))
sys.argv[0] = str(PACKAGE / "main.py")  # so that before_torch.py starts the fork server

import glue.before_torch  # noqa: E402, F401  (first, as in every main.py)

import torch.distributed.rpc as rpc  # noqa: E402

from glue import flags, launch  # noqa: E402

counts, changed = {}, threading.Condition()


def worker_name(rank, args):
    return f"worker{rank}" if rank else "counter"


def count(rank):
    with changed:
        counts[rank] = counts.get(rank, 0) + 1
        if counts[rank] == 1:
            print(f"worker {rank} counts", flush=True)
        changed.notify_all()


def parse_args():
    parser = flags.argument_parser(__doc__, ["count"], world_size=3, on_lost=True)
    parser.add_argument("--enough", type=int, default=10**9)
    parser.add_argument("--fail", type=int, default=0)
    args = parser.parse_args()
    flags.check_arguments(parser, args, min_world_size=2, roles="rank 0 counts", must_match=("enough",))
    return args


def note_lost(rank):
    with changed:
        changed.notify_all()
        return f"its {counts.get(rank, 0)} calls count" if rank in counts else ""


def run_worker(rank, args, job):
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=job.rpc_options())
    job.on_lost(note_lost if rank == 0 else None)
    if rank == 0:
        with changed:
            workers = range(1, args.world_size)
            changed.wait_for(lambda: all(rank in job.lost or counts.get(rank, 0) >= args.enough for rank in workers))
        print(f"done, lost {sorted(job.lost)}", flush=True)
    for number in range(args.enough if rank else 0):
        if rank == args.fail and number == 20:
            raise ValueError("injected fault")
        rpc.rpc_sync("counter", count, args=(rank,))
    job.wait_for_all()
    rpc.shutdown(graceful=args.on_lost == "stop")


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
