"""A process that has loaded torch and runs programs as forks of itself, so that tests need not wait for imports.

    a test ── request ──> warm.py ── fork ──> the program (become) ── "start my ranks" ──┐
                             │ starts it once                                            v
                             └──────────────────────────────────────────────> one fork server for all programs
                                                                                         │ fork
                                                                       the program's ranks (Adopted)

A real program starts a fork server of its own, or a new Python for each rank (mp.spawn). Here all programs share one,
so each rank adopts the process group, the output files and the environment variables of its program.
Only programs.py starts this file, `warm.py SOCKET`. It ends when its standard input is closed, that is, with the tests,
however they end. If a program still runs then, because the tests were killed, it is killed, too.
"""

import contextlib
import fcntl
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import signal
import socket
import sys

os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as glue/before_torch.py does, before torch is imported
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
    """The function of a spawned rank, with its command's process group, output and environment."""

    def __init__(self, function, request, together):
        self.function, self.request, self.together = function, request, together

    def __call__(self, *args):
        os.setpgid(0, self.request["group"])
        adopt(self.request)
        with leaving_together(self.request["stdout"]) if self.together else contextlib.nullcontext():
            self.function(*args)


@contextlib.contextmanager
def leaving_together(path):
    """No rank that uses this file leaves the block before all of them have ended it.

    Rank 0 of the programs in one file has torch's store, which the others need until the end of `rpc.shutdown`. A real
    process still runs for a moment after that, but a fork ends at once.
    """
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield
        fcntl.flock(file, fcntl.LOCK_EX)


def adopt(request):
    """Give this process the command's output files and environment."""
    for number, path in ((1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(request["environ"])
    # These two are read when Python and OpenMP start, and a fork does not start them.
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(line_buffering=True)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))


def become(request):
    """Run the command in this fork. Never returns."""
    os.setpgid(0, 0)
    request["group"] = os.getpid()
    os.chdir(request["cwd"])
    adopt(request)
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from warm import Adopted  # imported under a name with which ranks can unpickle it

    def start_processes(function, *args, start_method="spawn", **keywords):
        mine = request | {"environ": dict(os.environ)}  # the command may have changed its environment
        rank = Adopted(function, mine, together=start_method == "spawn")
        return plain(rank, *args, start_method="forkserver", **keywords)

    plain = torch.multiprocessing.start_processes
    torch.multiprocessing.start_processes = start_processes
    sys.modules["torch.multiprocessing.spawn"].start_processes = start_processes  # which mp.spawn calls
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server = multiprocessing.forkserver
    server.ensure_running = server._forkserver.ensure_running = lambda: None  # it is running already
    # The fork server's folder belongs to the warm process, so this command must not remove it at its end.
    multiprocessing.current_process()._config.pop("tempdir", None)
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    sys.path[1:1] = filter(None, request["environ"].get("PYTHONPATH", "").split(os.pathsep))
    together = leaving_together(request["room"]) if request["room"] else contextlib.nullcontext()
    status = 0
    try:
        with together:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1 if left.code else 0
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        multiprocessing.util._exit_function()  # removes the semaphores of queues, as Python does when it ends
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
    listener = multiprocessing.connection.Listener(sys.argv[1], "AF_UNIX", backlog=16)
    waiting = {}  # process id of a command -> the connection to which its exit status is sent
    while True:
        ready = multiprocessing.connection.wait([listener._listener._socket, woken, sys.stdin.fileno()])
        if sys.stdin.fileno() in ready:
            listener.close()
            for pid in waiting:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return os.rmdir(os.path.dirname(sys.argv[1]))  # the folder that programs.py made for the socket
        if woken in ready:
            woken.recv(100)
            for pid in list(waiting):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    with contextlib.suppress(OSError):  # the test has stopped waiting for it
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
