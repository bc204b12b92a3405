"""What must happen before torch is imported. A script that starts a job imports this module first.

Runs in the process that the user started. Each spawned rank imports main.py, and so this module, as well: in a rank
it starts nothing.
"""

import contextlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import signal
import socket
import sys
import threading

import psutil

from glue import PACKAGE_FOLDER

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# The fork server and the ranks import main.py, and so this module, too. They run no file (their sys.argv[0] is "-c"),
# or they have torch already.
_script = os.path.abspath(sys.argv[0])
STARTED_HERE = os.path.isfile(_script) and os.path.dirname(_script) == PACKAGE_FOLDER and "torch" not in sys.modules


def starts_ranks(words, environ=os.environ):
    """Return whether a main.py with this command line and environment will start all ranks itself.

    It is a guess, made before the command line is parsed. If it is wrong, the job starts some seconds later.
    """
    flags = {word.partition("=")[0] for word in words}
    launched = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID")
    return not flags & {"--rank", "--help", "-h"} and not any(name in environ for name in launched)


def start_fork_server():
    """Start the fork server, the process from which all ranks are forked, unless it is running already.

    It imports torch and this package, and does nothing else. So no rank has to import them again.
    """
    # torch first, then everything that main.py imports. A torch optimizer imports torch._dynamo when it is made.
    modules = ["torch.distributed.rpc", "main", "torch._dynamo"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    # Python starts the fork server and the resource tracker with `python -c`, which looks for every module in the
    # current directory first. That directory may hold a "main.py" or "random.py" of the user's, which must not be
    # executed. So both are started in this package's folder, where "main" is this package's main.py. This does not
    # change the ranks' working directory: multiprocessing sends it to each rank.
    users_folder = os.getcwd()
    os.chdir(PACKAGE_FOLDER)
    # Both inherit the blocked signals, and each rank inherits them from the fork server. A rank unblocks them once it
    # handles them (watch_signals).
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        multiprocessing.resource_tracker.ensure_running()  # unblocks some of them, so block them again
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.chdir(users_folder)


def stop_fork_server():
    """Kill the fork server and remove the folder of its socket. Ranks that still run get SIGINT (PR_SET_PDEATHSIG)."""
    with contextlib.suppress(OSError, psutil.Error):
        for child in psutil.Process().children():
            if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                child.kill()
    with contextlib.suppress(OSError):
        shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)


def handle_signals(handler):
    """Let `handler` handle the signals that end a job, except those that this process was started to ignore."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell's `&` and nohup set SIG_IGN
            signal.signal(number, handler)


def watch_signals(act):
    """From now on, call `act(number)` for each signal that ends a job, on a thread. Called on the main thread.

    Python runs signal handlers on the main thread, between two bytecodes. In a rank that only serves, the main thread
    waits in C++, so a handler would never run. The wakeup byte is written at once, on the thread that gets the signal.
    """
    received, sent = socket.socketpair()
    sent.setblocking(False)
    signal.set_wakeup_fd(sent.detach(), warn_on_full_buffer=False)
    handle_signals(lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # spawned ranks start with them blocked

    def watch():
        while True:
            number = received.recv(1)[0]
            if number in SIGNALS:  # or one for which the program has set a handler of its own
                act(number)

    threading.Thread(target=watch, daemon=True).start()


def _leave_at_once(number, _frame):
    stop_fork_server()
    os._exit(128 + number)


# If a stream is closed, as by `main.py >&-`, the next connection would get its number, and torch's messages would go
# there. So the number is given to /dev/null, and the processes that this one starts inherit it.
while (_number := os.open(os.devnull, os.O_RDWR)) < 3:
    os.set_inheritable(_number, True)
os.close(_number)
sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")

# When a rank dies, each RPC thread of the other ranks logs this from C++, with a stack. The glue prints one line
# instead. torch reads this level when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

if STARTED_HERE:
    # Importing torch takes seconds. Until the job handles signals itself, they end this process quietly.
    handle_signals(_leave_at_once)
    if starts_ranks(sys.argv[1:]):  # start it now: it imports torch while this process does
        start_fork_server()
