"""Run a package's main.py with a fault in one rank: what the tests cannot do to it with a signal from outside.

    python tests/harness/fault_injection.py PACKAGE RANK FAULT SECONDS [main.py's own flags]

FAULT is raised in that rank once SECONDS have passed since it met the others: from its next RPC, or, in a rank that
only serves, from its main thread, which waits there for the others.  Works spawned, by rank, and under torchrun.
"""

import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGE, FAULTY_RANK, FAULT, SECONDS = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
sys.path.insert(0, str(ROOT / PACKAGE))

import main as package_main  # noqa: E402  (the package's; found through the line above)


def raise_fault():
    if FAULT == "sys.exit":
        sys.exit(0)
    raise {"exception": ValueError, "memory": MemoryError, "remote": KeyError}[FAULT]("injected fault")


def run_worker(rank, args, job):
    if rank == FAULTY_RANK:
        from torch.distributed.rpc import api

        due = time.monotonic() + SECONDS
        plain_invoke, plain_wait = api._invoke_rpc, job.wait_for_all

        def invoke(*arguments, **keywords):
            if time.monotonic() >= due:
                raise_fault()
            return plain_invoke(*arguments, **keywords)

        def wait_for_all():
            time.sleep(max(0.0, due - time.monotonic()))
            raise_fault()
            plain_wait()

        api._invoke_rpc, job.wait_for_all = invoke, wait_for_all
    package_main.run_worker(rank, args, job)


if __name__ == "__main__":
    arguments = package_main.parse_args(sys.argv[5:])
    package_main.launch.launch(run_worker, arguments, package_main.worker_name)
