"""A job for test_runs.py: main.py with two RPC threads in each rank, so that there are more trainers than threads.

python tests/jobs/param_server/more_trainers_than_threads_job.py --mode sync --world_size 9
"""

import functools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "param_server"))
import main
from glue import launch
from ranks import worker_name


def run_worker(rank, args, job):
    job.rpc_options = functools.partial(job.rpc_options, num_worker_threads=2)
    main.run_worker(rank, args, job)


if __name__ == "__main__":
    launch.launch(run_worker, main.parse_args(), worker_name)
