"""The glue: what every job needs around its scenario. Each file has one topic. In reading order:

    launch         start the ranks: all of them from one process, one by one, or by torchrun
    job            the `job` that run_worker gets: how a rank joins, waits for all, and ends
    coordinator    its counterpart in rank 0, which decides what happens when a rank is lost
    meet           where the ranks meet
    sockets        messages over a connection, and on which network interface a rank listens
    open_calls     calls that are not answered yet, of a rank that leads others (not in rnn_rpc, which has none)
    scenario       what follows from the flags of a job, and what is refused
    flags          the flags that all four packages share
    training       seeds, and noticing that training has diverged
    report         what a run prints and writes: lines, progress bar, curves, summary
    errors         what an exception means, here or brought back by a call
    checkpoint     write files completely or not at all; save and load checkpoints
    host           GPUs, cores, transports and memory of this machine
    check          --check: what a job finds on its hosts, and the time of an RPC

Why this is more than torchrun: torchrun starts the ranks of a machine, watches them, names the first that fails, and
ends or restarts all. Under torchrun the glue leaves that to it. But a rank that is started by hand, in a terminal where
one can see and debug it, has no such parent, and with torchrun no job goes on without a lost rank. For these, the files
from launch to sockets do what torchrun does, and they need only that the kernel ends the connections of a dead process.

Each package has copies of the files that it imports. Edit rl_rpc/glue, then run `python tools/sync_glue.py`.
"""

import contextlib
import os
import sys
import threading

PACKAGE = os.path.basename(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# When a rank dies, each RPC thread of the other ranks logs this from C++, with a stack. The glue prints one line
# instead. torch reads this level when it is imported, so each main.py imports the glue first.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

# Each client of torch's store asks DNS for the name of an address, even of 127.0.0.1. Where DNS is silent, glibc would
# wait 10 seconds each time. It reads this when it asks for the first time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import torch.distributed.rpc  # noqa: E402

if not torch.distributed.rpc.is_available():
    why = "torch's own builds for Linux and macOS have it, those for Windows do not"
    sys.exit(f"{PACKAGE}: this torch ({torch.__version__}) was built without torch.distributed.rpc: {why}")


class UserError(ValueError):
    """Something that the user must correct: a bad file, a port that is taken, training that diverges.

    Its text is one line for the user, printed without a traceback. Any other exception is a mistake in the code, and
    its traceback is printed.
    """


def one_line(text):
    """Return a text with each control character, such as a newline in the name of a file, in its escaped form."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def print_error(text):
    """Print on stderr, in at most 2 seconds: perhaps nobody reads it, and this process is about to end."""
    # In one piece with its newline, because the ranks of a job may share this stream.
    within(2, lambda: print(f"{PACKAGE}: {text}\n", end="", file=sys.stderr, flush=True))


def within(seconds, write):
    """Call `write` on another thread, and do not wait for it longer than this."""

    def try_it():
        with contextlib.suppress(AttributeError, OSError, ValueError):  # it is closed, or cannot be written
            write()

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(seconds)
