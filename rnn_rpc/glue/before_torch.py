"""What must happen before torch is imported.  A script that starts a job imports this module first.

Runs in the process that the user started.  Each spawned rank imports main.py, and so this module, as well: in a rank
it starts nothing.
"""

import os
import signal
import socket
import sys

for stream in range(3):  # a stream that was closed (`>&-`): else the next file or socket would get its number
    try:
        os.fstat(stream)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
sys.stdout, sys.stderr = (each or open(os.devnull, "w") for each in (sys.stdout, sys.stderr))

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The fork server and the ranks import main.py, and so this module, too.  They run no file (their sys.argv[0] is "-c"),
# or they have torch already.
_script = os.path.abspath(sys.argv[0])
STARTED_HERE = os.path.isfile(_script) and os.path.dirname(_script) == PACKAGE_FOLDER and "torch" not in sys.modules


def leave_at_once(number, _frame):
    stop_fork_server()
    os._exit(128 + number)


def start_fork_server():
    """Start the fork server, the process from which all ranks are forked, unless it is running already.

    It imports torch and this package, and does nothing else.  So no rank has to import them again.
    """
    import multiprocessing.forkserver
    import multiprocessing.resource_tracker

    # torch first, then everything that main.py imports.  A torch optimizer imports torch._dynamo when it is made.
    modules = ["torch.distributed.rpc", "main", "torch._dynamo"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    # Python starts the fork server and the resource tracker with `python -c`, which looks for every module in the
    # current directory first.  That directory may hold a "main.py" or "random.py" of the user's, which must not be
    # executed.  So both are started in this package's folder, where "main" is this package's main.py.  This does not
    # change the ranks' working directory: multiprocessing sends it to each rank.
    users_folder = os.getcwd()
    os.chdir(PACKAGE_FOLDER)
    # The fork server inherits the blocked signals, and each rank inherits them from it.  A rank unblocks them once it
    # handles them (signals_as_bytes).
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        multiprocessing.resource_tracker.ensure_running()  # unblocks some of them, so block them again
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        multiprocessing.forkserver.ensure_running()
    except OSError as error:  # for example, the name of TMPDIR is too long for a socket
        sys.exit(f"{os.path.basename(PACKAGE_FOLDER)}: cannot make a socket in the temporary directory: {error}")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.chdir(users_folder)


def stop_fork_server():
    """Kill the fork server and remove the folder of its socket.  The ranks keep running."""
    if "multiprocessing.forkserver" in sys.modules:
        import multiprocessing
        import shutil

        if pid := multiprocessing.forkserver._forkserver._forkserver_pid:  # there is no public name for it
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(multiprocessing.process.current_process()._config.get("tempdir") or "", ignore_errors=True)


def signals_as_bytes():
    """Return a socket that receives each signal of this process as one byte.  Called on the main thread.

    Python runs signal handlers on the main thread, between two bytecodes.  In a rank that only serves, the main thread
    waits in C++, so a handler would never run.  This byte is written at once, on the thread that gets the signal.
    """
    received, sent = socket.socketpair()
    sent.setblocking(False)
    signal.set_wakeup_fd(sent.detach(), warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell's `&` and nohup set SIG_IGN: keep ignoring the signal
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # spawned ranks start with them blocked
    return received


if STARTED_HERE:  # importing torch takes seconds; until the job handles signals itself, they end this process quietly
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell's `&` and nohup set SIG_IGN: keep ignoring the signal
            signal.signal(number, leave_at_once)
    try:
        os.getcwd()
    except FileNotFoundError:  # torch's libraries cannot be loaded there either
        sys.exit(f"{os.path.basename(PACKAGE_FOLDER)}: the current directory does not exist any more")

# When a rank dies, each RPC thread of the other ranks logs this from C++, with a stack.  The glue prints one line
# instead.  torch reads this level when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

if STARTED_HERE:
    from glue.launchers import starts_ranks

    if starts_ranks(sys.argv[1:]):  # start it now: it imports torch while this process imports torch as well
        start_fork_server()
