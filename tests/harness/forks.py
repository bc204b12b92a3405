"""Run programs in forks of one process, which imports torch for all of them.

For these programs "spawn" means "fork", so their children need not import torch either. Nothing else is patched. So
two mistakes are not noticed: a program without a main guard, and one that uses a module without importing it, if
torch.distributed.rpc or this file imports it.
"""

import gc
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
from subprocess import CompletedProcess

from jobs import free_port
from programs import run_script


def run_in_forks(folder, commands, at_once=1, seconds=120, by=None, with_stores=False):
    """Run programs in `folder`, each for at most so many seconds; return {command: CompletedProcess}.

    `commands`: names of files, with flags behind them. `at_once`: how many run at the same time. `by`: see Program.
    `with_stores`: at each program's MASTER_PORT there is a store already, as under torchrun. So rank 0 may end before
    the others (see "`shutdown` raises on another rank than 0" in docs/TROUBLESHOOTING.md).
    """
    # Unbuffered, as on a terminal: the lines of several processes then come in the order in which they are printed.
    how = {"env": {"PYTHONUNBUFFERED": "1"}, "cwd": folder, "by": by, "timeout": 600}
    done = run_script(__file__, seconds, at_once, "with stores" if with_stores else "", *commands, **how)
    assert done.returncode == 0, done.stderr
    results = {}
    for number, (command, status) in enumerate(zip(commands, done.stdout.split(), strict=True)):
        output, errors = ((folder / f"{number}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
        results[command] = CompletedProcess(command, int(status), output, errors)
    return results


def start_program(number, command, port, seconds):
    """Run a program in a fork; return its process id."""
    pid = os.fork()
    if pid == 0:
        os.setsid()  # it may send signals to its group
        for descriptor, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{kind}", os.O_WRONLY | os.O_CREAT), descriptor)
        os.environ["MASTER_PORT"] = str(port)
        sys.argv = shlex.split(command)
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))  # before this folder
        signal.alarm(seconds)
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    return pid


def start_stores(ports):
    """Start a process with a store at each of these ports; return its process id."""
    pid = os.fork()
    if pid == 0:
        from torch.distributed import TCPStore

        stores = [TCPStore("localhost", port, is_master=True, wait_for_workers=False) for port in ports]
        signal.pause()  # until it is killed
        del stores
    return pid


def main(seconds, at_once, with_stores, *commands):
    import torch.distributed.rpc  # noqa: F401

    gc.freeze()  # else each fork spends half a second on these objects when it ends
    contexts = multiprocessing.context._concrete_contexts
    contexts["spawn"] = contexts["fork"]
    ports = [free_port() for _ in commands]
    keeper = start_stores(ports) if with_stores else None
    if with_stores:
        os.environ.update(MASTER_ADDR="localhost", TORCHELASTIC_USE_AGENT_STORE="True")
    waiting = [*enumerate(zip(commands, ports, strict=True))]
    running, statuses = {}, {}
    while waiting or running:
        while waiting and len(running) < int(at_once):
            number, (command, port) = waiting.pop(0)
            running[start_program(number, command, port, int(seconds))] = number
        pid, status = os.wait()
        assert pid != keeper, "the stores have ended"
        statuses[running.pop(pid)] = os.waitstatus_to_exitcode(status)
    if with_stores:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)
    print(*(statuses[number] for number in range(len(commands))))


if __name__ == "__main__":
    main(*sys.argv[1:])
