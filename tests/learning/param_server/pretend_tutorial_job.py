"""A job for test_pretend_device.py: a program in one file, with the pretend device as the GPU.

python tests/learning/param_server/pretend_tutorial_job.py PROGRAM BATCHES [the program's own flags]

Each trainer has BATCHES batches. single.py gets both pretended devices. Spawned ranks import this file again, so that
every process has them.
"""

import importlib
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "param_server"))
import torch.multiprocessing as mp
from torch.utils.data import Subset

import pretend_device

PROGRAM, BATCHES = sys.argv[1], int(sys.argv[2])
program = importlib.import_module(PROGRAM)
if PROGRAM == "tutorial_batch":
    next_batch_of = program.Trainer.get_next_batch

    def get_next_batch(trainer):
        for inputs, labels in next_batch_of(trainer):
            assert {str(inputs.device), str(labels.device)} == {pretend_device.DEVICE}
            yield inputs, labels

    program.Trainer.get_next_batch = get_next_batch
    FLAGS = ["--num_batches", str(BATCHES)]
else:
    load_all_digits = program.load_digits

    def few_digits(args, train):
        trainers = getattr(args, "world_size", 2) - 1
        return Subset(load_all_digits(args, train), range(trainers * BATCHES * 32 if train else 64))

    program.load_digits = few_digits
    FLAGS = ["--dataset", "synthetic", "--num_gpus", "1"]


def run_rank(rank, args):
    if PROGRAM == "tutorial_batch":
        program.run_worker(rank, args)
        return
    program.run_rank(rank, args)
    if rank == 0:
        print("weights on", *{str(param.device) for param in program.param_server.model.parameters()})


if __name__ == "__main__":
    assert pretend_device.MISSING is None
    command = sys.argv
    sys.argv = [PROGRAM, *FLAGS, *command[3:]]
    arguments = program.parse_args()
    sys.argv = command  # spawned ranks read it above
    if PROGRAM == "single":
        program.get_device = lambda number, num_gpus: program.torch.device("pretend", number)  # torch counts only one
        program.torch.manual_seed(arguments.seed)
        with pretend_device.one_thread():
            program.run_worker(arguments)
    else:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(arguments.master_port)
        mp.spawn(run_rank, (arguments,), nprocs=arguments.world_size)
