"""Run a package's main.py; each rank prints how much GPU memory it held after half of its work and at the end.

    python tests/harness/cuda_memory.py PACKAGE [main.py's own flags]

Each rank prints "memory rank R: A B": the MiB that its caching allocator had reserved after half of its work (A) and
after all of it (B). If one tensor is leaked in each iteration, B is much larger than A.
"""

import pathlib
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGE = sys.argv[1]
sys.path.insert(0, str(ROOT / PACKAGE))

import torch  # noqa: E402

import main as package_main  # noqa: E402  (the package's main.py, through the path set above)


def run_worker(rank, args, job):
    samples, over = [], threading.Event()

    def sample():
        while not over.wait(0.2):
            samples.append(torch.cuda.memory_reserved(job.device) / 2**20 if job.device.type == "cuda" else 0.0)

    thread = threading.Thread(target=sample)
    thread.start()
    package_main.run_worker(rank, args, job)
    over.set()
    thread.join()
    print(f"memory rank {rank}: {samples[len(samples) // 2]:.1f} {samples[-1]:.1f}", flush=True)


if __name__ == "__main__":
    arguments = package_main.parse_args(sys.argv[2:])
    package_main.launch.launch(run_worker, arguments, package_main.scenario)
