"""A job for test_equivalence.py: main.py in float64, where another order of additions changes only the 15th digit.

In float32 it can change the 6th digit after 20 training steps, depending on the CPU's convolutions.

python tests/param_server/double_job.py --mode replica --consistency sync --world_size 4 --num_servers 2
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "param_server"))
import digits_net
import main
import mnist_data
import replica_server
import replica_trainer
import scoreboard
import several_servers
from glue import launch
from rpc_names import worker_name


class DoubleNet(digits_net.Net):
    def __init__(self, **how):
        super().__init__(**how)
        self.double()

    def forward(self, x, dropout_key=None):
        return super().forward(x.double(), dropout_key)


def load_a_few(*which, **part):
    return [digits[:100] for digits in mnist_data.load_digits(*which, **part)]


def run_worker(rank, args, job):
    scoreboard.load_digits = load_a_few  # few images for the evaluation, because float64 is slow
    for module in (replica_server, replica_trainer, several_servers):
        module.Net = DoubleNet
    main.run_worker(rank, args, job)


if __name__ == "__main__":
    launch.launch(run_worker, main.parse_args(), worker_name)
