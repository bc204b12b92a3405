"""For exercises.py, in a copy of ddp_rpc: main.py, whose servers print how many bytes of tensors they have sent.

The copy's evaluation has only a few bags. So nearly all of these bytes are for the checkpoints, if the table is large.
"""

from glue import launch

from torch.distributed.rpc import internal

import main

pickle_message = internal._internal_rpc_pickler.serialize  # torch calls it for each call and each answer
sent = []


def count(message):
    pickled, tensors = pickle_message(message)
    sent.append(sum(tensor.nbytes for tensor in tensors))
    return pickled, tensors


def run_worker(rank, args, job):
    is_server = rank > main.num_trainers(args)  # a server calls nobody
    if is_server:
        internal._internal_rpc_pickler.serialize = count
    main.run_worker(rank, args, job)
    if is_server:
        print(f"{sum(sent)} bytes", flush=True)


if __name__ == "__main__":
    launch.launch(run_worker, main.parse_args(), main.scenario)
