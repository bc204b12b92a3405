"""A job for test_pretend_device.py: a program in one file, with the pretend device as the GPU.

python tests/learning/ddp_rpc/pretend_tutorial_job.py PROGRAM [the program's own flags]

Spawned ranks import this file again, so that every process has the device.
"""

import importlib
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "ddp_rpc"))
import torch
import torch.multiprocessing as mp

import pretend_device

PROGRAM = sys.argv[1]
program = importlib.import_module(PROGRAM)
EPOCHS = 2
program.range = lambda stop: range(EPOCHS if stop == 100 else stop)
program.get_device = lambda number, num_gpus: torch.device(pretend_device.DEVICE)  # it takes only CUDA
make_model = program.HybridModel.__init__


def make_and_check(model, emb, device):
    make_model(model, emb, device)
    assert {str(param.device) for param in model.fc.parameters()} == {pretend_device.DEVICE}
    print("fc on", device, flush=True)


program.HybridModel.__init__ = make_and_check

if __name__ == "__main__":
    assert pretend_device.MISSING is None
    command = sys.argv
    sys.argv = [PROGRAM, "--num_gpus", "1", *command[2:]]
    arguments = program.parse_args()
    sys.argv = command  # spawned ranks read it above
    if PROGRAM == "single":
        program.run_worker(arguments)
    else:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(arguments.master_port)
        mp.spawn(program.run_worker, (arguments,), nprocs=arguments.world_size)
