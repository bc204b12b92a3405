"""pool.py, each rank by itself. The leader is killed when it has learned from a task; the worker has to end then."""

import os
import signal

import pool

from jobs import free_port


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


pool.WORKERS = ["worker1"]
pool.Learner.learn = die
os.environ["MASTER_PORT"] = str(free_port())
del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # rank 0 has the store, unlike in other programs of a page
pids = []
for rank in range(2):
    pids.append(os.fork())
    if pids[-1] == 0:
        os.environ["RANK"] = str(rank)
        pool.main()
        os._exit(0)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
