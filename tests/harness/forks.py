"""Run programs in forks of one process, which imports torch for all of them, and patches nothing.

So a program that uses a module without importing it is not noticed if torch.distributed.rpc or this file imports it.
"""

import gc
import os
import runpy
import shlex
import signal
import sys
from subprocess import CompletedProcess

from jobs import free_port
from programs import run_script


def run_in_forks(folder, commands, at_once=False, seconds=120, by=None):
    """Run programs in `folder`, each for at most so many seconds; return {command: CompletedProcess}.

    `commands`: names of files, with flags behind them. `at_once`: not one after the other. `by`: see Program.
    """
    # Unbuffered, as on a terminal: the lines of several processes then come in the order in which they are printed.
    how = {"env": {"PYTHONUNBUFFERED": "1"}, "cwd": folder, "by": by, "timeout": 600}
    done = run_script(__file__, seconds, "at once" if at_once else "", *commands, **how)
    assert done.returncode == 0, done.stderr
    results = {}
    for number, (command, status) in enumerate(zip(commands, done.stdout.split(), strict=True)):
        output, errors = ((folder / f"{number}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
        results[command] = CompletedProcess(command, int(status), output, errors)
    return results


def start(number, command, seconds):
    """Run a program in a fork; return its process id."""
    pid = os.fork()
    if pid == 0:
        os.setsid()  # it may send signals to its group
        for descriptor, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{kind}", os.O_WRONLY | os.O_CREAT), descriptor)
        os.environ["MASTER_PORT"] = str(free_port())
        sys.argv = shlex.split(command)
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        signal.alarm(seconds)
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    return pid


def main(seconds, at_once, *commands):
    import torch.distributed.rpc  # noqa: F401

    gc.freeze()  # else each fork spends half a second on these objects when it ends
    pids = (start(*each, int(seconds)) for each in enumerate(commands))  # each is started when it is asked for
    for pid in [*pids] if at_once else pids:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
