"""Run programs in forks of one process, one after the other. It imports torch for all of them, and patches nothing.

So a program that uses a module without importing it is not noticed if torch.distributed.rpc or this file imports it.
"""

import gc
import os
import runpy
import signal
import sys
from subprocess import CompletedProcess

from jobs import free_port
from programs import run_script


def run_in_forks(folder, names):
    """Run these files of `folder`, each for at most 2 minutes; return {name: CompletedProcess}."""
    # Unbuffered, as on a terminal: the lines of several processes then come in the order in which they are printed.
    done = run_script(__file__, *names, env={"PYTHONUNBUFFERED": "1"}, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stderr
    results = {}
    for name, status in zip(names, done.stdout.split(), strict=True):
        output, errors = ((folder / f"{name}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
        results[name] = CompletedProcess(name, int(status), output, errors)
    return results


def status_of(name):
    """Run a program in a fork; return its exit status."""
    with open(f"{name}.out", "w") as out, open(f"{name}.err", "w") as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ["MASTER_PORT"] = str(free_port())
            sys.argv, sys.path[0] = [name], os.getcwd()
            signal.alarm(120)
            runpy.run_path(name, run_name="__main__")
            sys.exit()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    import torch.distributed.rpc  # noqa: F401

    gc.freeze()  # else each fork spends half a second on these objects when it ends
    for name in sys.argv[1:]:
        print(status_of(name), flush=True)
