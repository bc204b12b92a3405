"""A job for test_equivalence.py: main.py in float64, where another order of additions changes only the 15th digit.

In float32 it can change the 6th digit after 20 training steps, depending on the CPU's convolutions.

python tests/learning/param_server/float64_job.py --mode sync --world_size 3
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "param_server"))
import data
import main
import net
import replica
from glue import launch
from ranks import worker_name


class DoubleNet(net.Net):
    def __init__(self, **how):
        super().__init__(**how)
        self.double()

    def forward(self, x):
        return super().forward(x.double())


def load_fewer_to_evaluate(*which, train):
    """Return few images for the evaluation, because float64 is slow."""
    return [digits if train else digits[:100] for digits in data.load_digits(*which, train=train)]


def run_worker(rank, args, job):
    main.load_digits = load_fewer_to_evaluate
    replica.Net = DoubleNet
    main.run_worker(rank, args, job)


if __name__ == "__main__":
    launch.launch(run_worker, main.parse_args(), worker_name)
