"""What has to happen before torch is loaded.  Only a script that starts a job imports this, as its first line.

Runs in the process that was started, and (to no effect) in each spawned rank, which imports main.py as well.
"""

import os
import signal
import sys

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STARTED_HERE = os.path.dirname(os.path.abspath(sys.argv[0])) == PACKAGE_FOLDER and "torch" not in sys.modules


def leave_at_once(number, _frame):
    stop_fork_server()
    os._exit(128 + number)


def start_fork_server():
    """Start the process that ranks are forked from, unless it runs already.

    It has loaded torch and this package and done nothing else.  So no rank has to load them again.
    """
    import multiprocessing.forkserver
    import multiprocessing.resource_tracker

    # First torch, then what this package imports, and what each of torch's optimizers loads at its first step.
    modules = ["torch.distributed.rpc", "main", "torch._dynamo"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    # Python starts this process and its resource tracker with `python -c`, which looks for every module in the current
    # directory first.  There "main", or "random", may be a file of the user's, which must not be executed.  So they are
    # started in this package's folder: there "main" is this package's (where the ranks work, each is told by itself).
    users_folder = os.getcwd()
    os.chdir(PACKAGE_FOLDER)
    # It inherits the set of blocked signals, and so does each rank, which unblocks them when it handles them.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        multiprocessing.resource_tracker.ensure_running()  # it unblocks some of them, hence once more:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        multiprocessing.forkserver.ensure_running()
    except OSError as error:  # a TMPDIR whose name is too long for a socket in it, say
        sys.exit(f"{os.path.basename(PACKAGE_FOLDER)}: no place for a socket in the temporary directory: {error}")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.chdir(users_folder)


def stop_fork_server():
    """End the process that ranks are forked from (the ranks themselves stay), and remove its socket's folder."""
    if "multiprocessing.forkserver" in sys.modules:
        import multiprocessing
        import shutil

        if pid := multiprocessing.forkserver._forkserver._forkserver_pid:  # it has no public name
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(multiprocessing.process.current_process()._config.get("tempdir") or "", ignore_errors=True)


if STARTED_HERE:  # loading torch takes seconds: until the job handles signals itself, they end this process quietly
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # started in the background, or by nohup: not meant for us
            signal.signal(number, leave_at_once)

# When a rank dies, the RPC threads of the others each log it from C++, with a stack, beside the one line of the glue.
# torch reads this level when it is loaded.
if "--debug" not in sys.argv:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

if STARTED_HERE:
    from glue.launchers import starts_ranks

    if starts_ranks(sys.argv[1:]):  # now, so that the fork server loads torch while this process does
        start_fork_server()
