"""A process that has loaded torch and waits to become any command: what a run costs in tests is its work, not imports.

    python tests/harness/warm.py SOCKET

helpers.run_main and run_script use it for runs where starting is not the point; tests/glue starts its jobs for real.
Each command is a fork of this process, and its spawned ranks are forks of one fork server for all commands, where each
real command starts its own.  Ends when its stdin does: with the tests.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import sys

os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as glue/before_torch.py does, before torch is loaded
import torch.multiprocessing

PRELOAD = [
    "torch.distributed.rpc",
    "torch.distributed.optim",
    "torch._dynamo",
    "gymnasium",
    "psutil",
    "tqdm",
    "matplotlib.font_manager",
]
for name in PRELOAD:
    __import__(name)


class Adopted:
    """What a spawned rank runs, with the command's output and environment, not the fork server's."""

    def __init__(self, function, request):
        self.function, self.request = function, request

    def __call__(self, *args):
        adopt(self.request)
        self.function(*args)


def adopt(request):
    """Let this process write where the command's output goes, and see its environment."""
    for number, path in ((1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(request["environ"])


def become(request):
    """Turn this fork into the command; never returns."""
    os.setsid()
    os.chdir(request["cwd"])
    adopt(request)
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from warm import Adopted  # under the name by which ranks can load it

    plain = torch.multiprocessing.start_processes
    torch.multiprocessing.start_processes = lambda function, *args, **keywords: plain(
        Adopted(function, request), *args, **keywords
    )
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server = multiprocessing.forkserver
    server.ensure_running = server._forkserver.ensure_running = lambda: None  # it does: it is the warm process's
    multiprocessing.forkserver._forkserver._forkserver_pid = None  # and is not this command's to end,
    multiprocessing.current_process()._config.pop("tempdir", None)  # nor is the folder of its socket to remove
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    status = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1 if left.code else 0
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main():
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    listener = multiprocessing.connection.Listener(sys.argv[1], "AF_UNIX")
    print("warm", flush=True)
    waiting = {}  # process id of a command -> the connection that wants its status
    while True:
        ready = multiprocessing.connection.wait([listener._listener._socket, woken, sys.stdin.fileno()])
        if sys.stdin.fileno() in ready:
            listener.close()
            return os.rmdir(os.path.dirname(sys.argv[1]))  # which helpers.py has made for the socket
        if woken in ready:
            woken.recv(100)
            for pid in list(waiting):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    with contextlib.suppress(OSError):  # a test that did not wait for it any longer
                        waiting.pop(pid).send(os.waitstatus_to_exitcode(status))
        if listener._listener._socket in ready:
            connection = listener.accept()
            request = connection.recv()
            pid = os.fork()
            if pid == 0:
                become(request)
            connection.send(pid)
            waiting[pid] = connection


if __name__ == "__main__":
    main()
