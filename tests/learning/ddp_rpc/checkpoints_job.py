"""For exercises.py: main.py, whose servers print how many bytes of tensors they have answered with.

python tests/learning/ddp_rpc/checkpoints_job.py --world_size 4 --batches 5 --checkpoint end.pt

An evaluation has only a few bags. So nearly all of these bytes are for the checkpoints, if the table is large.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "ddp_rpc"))
from torch.distributed.rpc import internal

import evaluation
import main
from glue import launch

evaluation.HELDOUT_BATCHES, evaluation.HELDOUT_BAGS = 1, 8
pickle_message = internal._internal_rpc_pickler.serialize  # torch calls it for each call and each answer
sent = []


def count(message):
    pickled, tensors = pickle_message(message)
    sent.append(sum(tensor.nbytes for tensor in tensors))
    return pickled, tensors


def run_worker(rank, args, job):
    if rank > args.num_trainers:  # a server, which calls nobody
        internal._internal_rpc_pickler.serialize = count
    main.run_worker(rank, args, job)
    if rank > args.num_trainers:
        print(f"{sum(sent)} bytes", flush=True)


if __name__ == "__main__":
    launch.launch(run_worker, main.parse_args(), main.worker_name)
